"""PEFT's patterns (rank_pattern, alpha_pattern): expressions that a module's name ends with, matched in bounded time.

They come out of an adapter's file, and Python's `re` tries one way through an expression after the other: `(a+)+b` over
forty letters outlasts everybody. Here a name is walked with the set of all places that can be reached so far, which no
expression can make larger than the name. Plain names, dots and backslashes, which is nearly all there is in practice,
have one way only and stay with `re`; the rest is read by the parser that `re` itself uses (private; under these names
since Python 3.11), so that it means the same. Whatever a set of places cannot tell (back references, looking ahead) is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

LONGEST, STEPS = 1000, 1_000_000  # characters of an expression; steps over all names and expressions of a table
_CATEGORIES = {
    codes.CATEGORY_DIGIT: r"\d", codes.CATEGORY_NOT_DIGIT: r"\D", codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S", codes.CATEGORY_WORD: r"\w", codes.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip
_MORE = "a pattern of more than letters, sets, choices and repeats"


class Unmatched(ValueError):
    """An expression that cannot be matched here, and why."""


class Steps:
    """What is left of them."""

    def __init__(self, left: int = STEPS):
        self.left = left

    def take(self, count: int = 1) -> None:
        self.left -= count
        if self.left < 0:
            raise Unmatched("patterns that take too long to match")


def ends_with(key: str, steps: Steps) -> Callable[[str], bool]:
    """Whether a name is the expression, or ends with it behind a dot: as PEFT asks."""
    if len(key) > LONGEST:
        raise Unmatched(f"a pattern of {len(key)} characters")
    whole = rf"(.*\.)?({key})$"
    try:
        if re.fullmatch(r"(?:[\w.-]|\\\.)*", key):
            plain = re.compile(whole)
            return lambda name: plain.match(name) is not None
        tree = parser.parse(whole)
    except (re.error, OverflowError, RecursionError) as error:
        raise Unmatched(f"the pattern {key!r}, which is none ({error})") from None
    if tree.state.flags & ~re.UNICODE:
        raise Unmatched(f"the pattern {key!r} with flags")

    def fits(name: str) -> bool:
        try:
            return bool(_walk(tree, name, {0}, steps))
        except RecursionError:
            raise Unmatched("patterns that are nested too deeply") from None

    return fits


def _walk(ops: Iterable[tuple[Any, Any]], name: str, places: set[int], steps: Steps) -> set[int]:
    """Where the expression may end that begins at one of these places."""
    for op, given in ops:
        steps.take(1 + len(places))
        if not places:
            return places
        if op is codes.BRANCH:
            places = set().union(*(_walk(branch, name, places, steps) for branch in given[1]))
        elif op is codes.SUBPATTERN and not given[1] and not given[2]:
            places = _walk(given[3], name, places, steps)
        elif op in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, inner = given
            places = _repeated(least, most, inner, name, places, steps)
        elif op is codes.AT:
            places = {place for place in places if _at(given, place, name)}
        else:
            places = {p + 1 for p in places if p < len(name) and _is(op, given, name[p])}
    return places


def _repeated(least: int, most: int, ops: Any, name: str, places: set[int], steps: Steps) -> set[int]:
    for _ in range(least):
        after = _walk(ops, name, places, steps)
        if after == places:
            break
        places = after
    reached, new = set(places), places
    for _ in range(min(int(most) - least, len(name) + 1)):
        new = _walk(ops, name, new, steps) - reached
        if not new:
            break
        reached |= new
    return reached


def _at(where: Any, place: int, name: str) -> bool:
    if where in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING):
        return place == 0
    if where in (codes.AT_END, codes.AT_END_STRING):
        return place == len(name)
    raise Unmatched(_MORE)


def _is(op: Any, given: Any, letter: str) -> bool:
    if op is codes.LITERAL:
        return ord(letter) == given
    if op is codes.NOT_LITERAL:
        return ord(letter) != given
    if op is codes.ANY:
        return letter != "\n"
    if op is codes.RANGE:
        return bool(given[0] <= ord(letter) <= given[1])
    if op is codes.CATEGORY:
        return re.match(_CATEGORIES[given], letter) is not None
    if op is codes.IN:
        negated = given[0][0] is codes.NEGATE
        return any(_is(code, value, letter) for code, value in given[negated:]) != negated
    raise Unmatched(_MORE)
