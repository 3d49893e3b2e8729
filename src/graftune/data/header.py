"""Finds where an answer begins in a rendering that does not start with the inference prompt.

A template may write the header of an answer differently in its generation prompt: other blanks, another case, a typo,
no name, a reasoning block that it opens. Searching for marker strings fails with the next template, so the borders are
found by rendering the conversation with other texts: text that changes is the author's, all other text the template's.
That gives the prompt's text after the last message before the answer, and the rendering's text between that message and
the answer. The two are aligned unit by unit (control tokens, tags, words, blanks) with the least cost of differences.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from graftune.data.format import REASONING_KEYS
from graftune.data.row import Refusal
from graftune.data.tags import TAG, tag_kind
from graftune.data.turns import Message

MOST_UNITS = 240  # of a header that are aligned, counted from its end
_LETTERS = "ZQXJKVW"  # a text is changed with one that it does not begin or end with
# What it costs to leave a unit of the prompt out, and to pass over one of the rendering.
_LEFT_OUT = {"blank": 5, "sign": 40, "word": 150, "tag": 300}
_PASSED = {"blank": 5, "sign": 30, "word": 70, "tag": 120}
_NEVER = 10**6  # the cost of matching units that are different things

_WORTH = 100  # another place of the answer is taken only if its cost is lower by more than this

Render = Callable[..., str]  # (messages, generate=...) -> text; raises Refusal


class Aligned(NamedTuple):
    """`end`: the length of the part of the rendering's header that the prompt has too. `extra`: the end of the prompt
    that the rendering does not have."""

    end: int
    extra: str
    cost: int


class Header(NamedTuple):
    """Where the answer lies in a rendering: `begin` is the end of the header that the prompt has, `start` the first
    character that the author controls. `extra` is the end of the prompt that the rendering does not have."""

    begin: int
    start: int
    extra: str
    prompt_tail: str  # the prompt after the last message's text


def locate(render: Render, messages: list[Message], prompt: str, full: str, control: tuple[str, ...]) -> Header:
    """Finds the header of the last message. `full` is rendered with that message, `prompt` is the generation prompt."""
    tail, place = _tails(render, messages, prompt, full, control)
    found: list[tuple[int, Header]] = []  # with their costs
    for start in _starts(render, messages, full):
        start = max(place, _before_tag(full, place, start, control))
        aligned = align(prompt[tail:], full[place:start], control)
        header = Header(place + aligned.end, start, aligned.extra, prompt[tail:])
        found.append((aligned.cost, header))
        if not TAG.search(aligned.extra):
            break
    if not found:
        raise Refusal("refused by the chat template", "it takes no other text in place of this answer")
    best = found[0]
    for one in found[1:]:
        best = one if one[0] < best[0] - _WORTH else best
    return best[1]


def _starts(render: Render, messages: list[Message], full: str) -> Iterator[int]:
    """Where `full` first differs from the rendering of a plain answer, and, for turns that call tools, from the
    rendering of another call: a call's header may differ from an answer's. Renderings that the template refuses are
    skipped."""
    message, head = messages[-1], messages[:-1]
    letter = _letter(message)
    plain = {key: value for key, value in message.items() if key not in (*REASONING_KEYS, "tool_calls")}
    others = [plain | {"content": f"{letter}k zero one"}]
    if message.get("tool_calls"):
        others.append(_changed(message, letter, front=True))
    for other in others:
        with suppress(Refusal):
            yield len(shared_start(full, render([*head, other])))


def _tails(
    render: Render, messages: list[Message], prompt: str, full: str, control: tuple[str, ...]
) -> tuple[int, int]:
    """Where the text of the message before the answer ends, in `prompt` and in `full`. To find it, both are rendered
    again with one more letter at that end. If the message is not rendered: the place up to which the two agree."""
    letter = _letter(messages[-2])
    head = [*messages[:-2], _changed(messages[-2], letter, front=False)]
    try:
        others = render(head, generate=True), render([*head, messages[-1]])
    except Refusal:
        others = (prompt, full)
    tail, place = (
        len(text) - len(shared_start(text[::-1], other[::-1]))
        for text, other in zip((prompt, full), others, strict=True)
    )
    if not tail or not place:
        tail = place = shared_header(prompt, full, control)
    return tail, place


def _letter(message: Message) -> str:
    """A letter that no text of the message begins or ends with."""
    edges = {edge for text in _texts(message) for edge in (text[:1], text[-1:], text.strip()[:1], text.strip()[-1:])}
    return next(letter for letter in _LETTERS if letter not in edges) if len(edges) < len(_LETTERS) else _LETTERS[0]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _changed(message: Message, letter: str, *, front: bool) -> Message:
    """The message with a letter added to each text of its author, at the front or at the end."""

    def longer(value: Any) -> Any:
        if isinstance(value, str):
            return letter + value if front else value + letter
        if isinstance(value, dict):
            return {key: longer(inner) for key, inner in value.items()}
        return [longer(inner) for inner in value] if isinstance(value, list) else value

    made = dict(message)
    if (message["content"] or "").strip() or not message.get("tool_calls"):
        made["content"] = longer(message["content"] or "")
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            made[key] = longer(message[key])
    if message.get("tool_calls"):
        made["tool_calls"] = [_changed_call(call, longer) for call in message["tool_calls"]]
    return made


def _changed_call(call: Message, longer: Callable[[Any], Any]) -> Message:
    function = call.get("function", {})
    return {**call, "function": {k: longer(v) if k in ("name", "arguments") else v for k, v in function.items()}}


def _before_tag(full: str, place: int, start: int, control: tuple[str, ...]) -> int:
    """`start`, or the beginning of the control token or tag that it lies in."""
    at = place
    for unit in units(full[place : start + 64], control):
        if at < start < at + len(unit):
            return at if _kind(unit, control) == "tag" else start
        at += len(unit)
    return start


@functools.lru_cache(maxsize=512)
def align(prompt: str, header: str, control: tuple[str, ...]) -> Aligned:
    """Align all of `prompt` with a beginning of `header`."""
    asked, shown = units(prompt, control)[-MOST_UNITS:], units(header, control)
    skipped = len(header) - sum(map(len, shown[-MOST_UNITS:]))
    shown = shown[-MOST_UNITS:]
    kinds = [_kind(unit, control) for unit in asked], [_kind(unit, control) for unit in shown]
    costs = [0]
    for kind in kinds[1]:
        costs.append(costs[-1] + _PASSED[kind])
    ways: list[list[str]] = [["passed"] * len(costs)]
    agreed = [False] * len(costs)  # whether the last units, blanks aside, are taken for each other
    for unit, kind in zip(asked, kinds[0], strict=True):
        row, way = [costs[0] + _LEFT_OUT[kind]], ["left"]
        for j, (other, other_kind) in enumerate(zip(shown, kinds[1], strict=True), 1):
            both = costs[j - 1] + (_difference(unit, other) if kind == other_kind else _NEVER)
            if kind == "word" and not agreed[j - 1] and not _same_word(unit, other):
                both = _NEVER  # different words are names of one role only if the units before them agree
            left, passed = costs[j] + _LEFT_OUT[kind], row[-1] + _PASSED[other_kind]
            best = min(left, both, passed)
            row.append(best)
            # Of equally cheap alignments, take the one that matches early: text that only the prompt has is at its end.
            way.append("left" if best == left else "both" if best == both else "passed")
        costs = row
        agreed = [False, *(way[j] == "both" and (kind != "blank" or agreed[j - 1]) for j in range(1, len(way)))]
        ways.append(way)
    cost = min(costs)
    i, j = len(asked), costs.index(cost)
    path: list[tuple[int, int]] = []  # the units that agree, from the last on
    while i:
        if ways[i][j] == "both":
            path.append((i, j))
        i, j = i - (ways[i][j] != "passed"), j - (ways[i][j] != "left")
    # The header ends with the last unit that agrees and the blanks after it: blanks further on agree by chance.
    i, j = next(((i, j) for i, j in path if kinds[0][i - 1] != "blank"), (0, 0))
    while (i + 1, j + 1) in path:
        i, j = i + 1, j + 1
    return Aligned(skipped + sum(map(len, shown[:j])) if j else 0, "".join(asked[i:]) if i else prompt, cost)


def _difference(one: str, other: str) -> int:
    """The cost of matching two different units of the same kind; 0 if they are equal."""
    if one == other:
        return 0
    if one.isspace():
        return 5
    if one.casefold() == other.casefold():
        return 10
    if one[:1].isalnum() or one[:1] == "_":
        return 40 if _same_word(one, other) else 120
    words = [re.findall(r"[^\W_]+", tag.casefold()) for tag in (one, other)]
    alike = len(words[0]) == len(words[1]) and all(map(_misspelt, *words))
    return 60 if len(one) > 1 and alike and tag_kind(one)[1] == tag_kind(other)[1] else _NEVER


def _same_word(one: str, other: str) -> bool:
    return _misspelt(one.casefold(), other.casefold())


@functools.lru_cache(maxsize=4096)
def _misspelt(one: str, other: str) -> bool:
    """Whether one word may be the other with a wrong letter or two."""
    return difflib.SequenceMatcher(None, one, other).ratio() >= 0.75


def units(text: str, control: tuple[str, ...]) -> list[str]:
    """Control tokens, tags, words, and single blanks and signs of a text."""
    return [match[0] for match in _pattern(control).finditer(text)]


@functools.lru_cache(maxsize=16)
def _pattern(control: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join([*map(re.escape, control), TAG.pattern, r"\w+|\s|."]), re.DOTALL)


def _kind(unit: str, control: tuple[str, ...]) -> str:
    if unit.isspace():
        return "blank"
    if len(unit) > 2 and (unit in control or TAG.fullmatch(unit)):
        return "tag"
    return "word" if unit[0].isalnum() or unit[0] == "_" else "sign"


def shared_start(*texts: str) -> str:
    low, high = min(texts), max(texts)  # every text sorted between these two has the same start
    known, limit = 0, min(len(low), len(high))
    while known < limit:
        middle = (known + limit + 1) // 2
        if low[known:middle] == high[known:middle]:
            known = middle
        else:
            limit = middle - 1
    return low[:known]


def shared_header(prompt: str, full: str, control: tuple[str, ...] = ()) -> int:
    """How far `prompt` and `full` agree, in whole control tokens, tags and words."""
    reach = len(shared_start(prompt, full))
    return max(borders(prompt, control, reach) & borders(full, control, reach), default=0)


def borders(text: str, control: tuple[str, ...], reach: int) -> set[int]:
    """Places up to `reach` that lie between control tokens, tags, words and other letters of `text`."""
    places = {0}
    for match in _pattern(control).finditer(text):
        if match.end() > reach:
            break
        places.add(match.end())
    return places
