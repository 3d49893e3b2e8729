"""PEFT's patterns (rank_pattern, alpha_pattern): expressions that a module's name ends with, matched in bounded time.

The expressions come out of an adapter's file, and Python's `re` has no limit: `(a+)+b` over forty letters does not
return. Plain names, which are nearly all there is in practice, match in one way only and stay with `re`. Everything
else is compiled by `re`, so that what PEFT would refuse is refused here too, and matched by the `regex` package, which
reads the same syntax and takes a time limit. An engine of our own would have to follow every release of `re`.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable

LONGEST = 1000  # characters of an expression
SECONDS = 5.0  # for all names and expressions of a table; real ones take milliseconds
_TOO_LONG = "patterns that take too long to match"


class Unmatched(ValueError):
    """An expression that cannot be matched here, and why."""


class Deadline:
    """The time that is left for a table of expressions."""

    def __init__(self) -> None:
        self._end = time.monotonic() + SECONDS

    def left(self) -> float:
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise Unmatched(_TOO_LONG)
        return seconds


def ends_with(key: str, deadline: Deadline) -> Callable[[str], bool]:
    """Return a test of whether a name is the expression, or ends with it after a dot: as PEFT asks."""
    if len(key) > LONGEST:
        raise Unmatched(f"a pattern of {len(key)} characters")
    whole = rf"(.*\.)?({key})$"
    try:
        with warnings.catch_warnings():  # a set that looks like one of sets, which `regex` would read otherwise
            warnings.simplefilter("error", FutureWarning)
            plain = re.compile(whole)
        if re.fullmatch(r"(?:[\w.-]|\\\.)*", key):
            return lambda name: plain.match(name) is not None
        if re.search(r"\{(?!\d*,?\d*\})", key):
            raise Unmatched(f"the pattern {key!r}, whose braces are not a repeat")  # approximate matching in `regex`
        import regex

        pattern = regex.compile(whole)
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        raise Unmatched(f"the pattern {key!r}, which is not a valid expression ({error})") from None

    def fits(name: str) -> bool:
        try:
            return pattern.match(name, timeout=deadline.left()) is not None
        except TimeoutError:
            raise Unmatched(_TOO_LONG) from None

    return fits
