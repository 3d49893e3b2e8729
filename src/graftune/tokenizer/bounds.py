"""How large the values of a chat template may get, and what its filters and methods may be given.

Everything is judged before it is done: products, paddings and formats by the size of what they would make, searches
by the steps that they would take. Texts are counted in characters, and every value of a list or table as `EACH` more.
Filters and methods that take a few nanoseconds a character (`_FAST`) may have any text that the rendering may hold,
those of lists any list; the others, which no template uses on whole conversations, have `SMALL` characters. So a name
that a later Jinja adds is bounded too. Rejected: a process for each rendering with limits from the kernel, which costs
more than the rendering.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import jinja2.sandbox

LARGEST = 1 << 24  # characters of a text or a list, however long the conversation
FLOOR = 1 << 16  # characters that any rendering may make
SMALL = 1 << 14  # characters of a text for whatever is not fast
EACH = 64  # characters that any value counts as
MOST_BITS = 1 << 14  # of a whole number
MOST_STEPS = 1 << 27  # of a search whose time is a product of two lengths
MOST_DIGITS = 1000  # that a number is rounded to
MOST_DOTS = 4  # of an attribute's path

# By filters and methods of texts alike. Most make a copy at most; what else they make is told by `made`.
_FAST = {
    "attr", "capitalize", "casefold", "center", "count", "d", "default", "e", "endswith", "escape", "expandtabs",
    "find", "first", "forceescape", "format", "format_map", "indent", "index", "isalnum", "isalpha", "isascii",
    "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
    "items", "last", "length", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace",
    "reverse", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "safe", "split", "splitlines",
    "startswith", "string", "strip", "swapcase", "tojson", "trim", "truncate", "upper", "zfill",
}  # fmt: skip
_OF_LISTS = {
    "batch", "dictsort", "groupby", "join", "list", "map", "max", "min", "random", "reject", "rejectattr", "select",
    "selectattr", "slice", "sort", "unique",
}  # fmt: skip
_SEARCHING = {"rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip", "trim"}
# Whatever they are given, and as often as real templates call them, there is nothing to ask but what `made` tells.
FREE = _FAST - _SEARCHING - {"reverse"}
_BY_ATTRIBUTE = {"groupby", "map", "max", "min", "rejectattr", "selectattr", "sort", "sum", "unique"}
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


class Endless(Exception):
    """A template takes more time or memory than any has reason to."""


def too_large(most: int) -> Endless:
    return Endless(f"makes or uses a text or a list of more than {most} characters")


def most_made(source: int, given: int) -> int:
    """Characters of the longest text or list, and of the output: a template's own words may stand in the output twice
    and again with every message. `given` is the weight of the conversation, some 300 for an empty message."""
    return min(LARGEST, FLOOR + 2 * source + min(64 * given, (1 << 20) + 4 * given))


def weight(value: Any, most: int) -> int:
    """About the characters of a value's text. It stops counting beyond `most`: the same list may stand in another many
    times."""
    total, waiting = EACH, [value]
    while waiting and total <= most:
        one = waiting.pop()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, list | tuple):
            total += EACH * len(one)
            if total <= most:
                waiting += one
        elif isinstance(one, dict):
            total += 2 * EACH * len(one)
            if total <= most:
                waiting += one
                waiting += one.values()
    return total


def is_slow(name: str) -> bool:
    return name not in _FAST and name not in _OF_LISTS


def check_given(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """What a filter or a method of texts is given, by its own cost."""
    values = (*args, *named.values())
    if name not in _FAST and any(isinstance(value, str) and len(value) > SMALL for value in values):
        raise too_large(SMALL)
    if is_slow(name) and sum(weight(_listed(value), SMALL) for value in values) > SMALL:
        raise too_large(SMALL)
    if name in _BY_ATTRIBUTE and any(isinstance(value, str) and value.count(".") > MOST_DOTS for value in values):
        raise Endless(f"asks for attributes more than {MOST_DOTS} levels deep")
    if name == "round" and any(isinstance(value, int) and abs(value) > MOST_DIGITS for value in values[1:]):
        raise Endless(f"rounds to more than {MOST_DIGITS} digits")
    if name in _SEARCHING:
        texts = [len(value) for value in values if isinstance(value, str)]
        if len(texts) > 1 and texts[0] * max(texts[1:]) > MOST_STEPS:
            raise Endless("searches for too long a text")


def made(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> int:
    """About the characters that a filter or a method of texts makes, where they may be many more than it is given."""
    counted = _MADE.get(name)
    return counted(args, named) if counted else 0


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, range) else value


def _one(place: int, name: str, args: Sequence[Any], named: Mapping[str, Any], otherwise: Any) -> Any:
    return args[place] if len(args) > place else named.get(name, otherwise)


def _largest_number(args: Sequence[Any], named: Mapping[str, Any]) -> int:
    return max((abs(value) for value in (*args[1:], *named.values()) if isinstance(value, int)), default=0)


def _padded(args: Sequence[Any], named: Mapping[str, Any]) -> int:
    return _largest_number(args, named)


def _grouped(args: Sequence[Any], named: Mapping[str, Any]) -> int:
    return EACH * _largest_number(args, named)


def _indented(args: Sequence[Any], named: Mapping[str, Any]) -> int:
    width = _one(1, "width", args, named, 4)
    width = len(width) if isinstance(width, str) else abs(width) if isinstance(width, int) else 0
    return (1 + _lines(args[0])) * width


def _lines(text: Any) -> int:
    return sum(map(text.count, _LINE_ENDS)) if isinstance(text, str) else 0


def _tabs(args: Sequence[Any], named: Mapping[str, Any]) -> int:
    return (1 + args[0].count("\t")) * (_largest_number(args, named) or 8)


def _replaced(args: Sequence[Any], named: Mapping[str, Any]) -> int:
    """The filter makes a text of whatever it is given."""
    old, new = _one(1, "old", args, named, ""), _one(2, "new", args, named, "")
    if not (isinstance(old, str) and isinstance(new, str)):
        return 0
    text = args[0] if isinstance(args[0], str) else str(args[0])
    return len(text) + text.count(old) * len(new)


def _joined(args: Sequence[Any], named: Mapping[str, Any]) -> int:
    """By the filter, values and then what parts them; by the method the other way round."""
    texts = [len(value) for value in (*args, *named.values()) if isinstance(value, str)]
    count = max((len(value) for value in args if isinstance(value, Sized)), default=0)
    return sum(weight(value, LARGEST) for value in args) + count * max(texts, default=0)


def _split(args: Sequence[Any], named: Mapping[str, Any]) -> int:
    text, parting = args[0], _one(1, "sep", args, named, None)
    return len(text) + EACH * len(text.split(parting, LARGEST // EACH)) if len(text) * EACH > LARGEST else 0


def _split_lines(args: Sequence[Any], named: Mapping[str, Any]) -> int:
    return len(args[0]) + EACH * _lines(args[0])


def _translated(args: Sequence[Any], named: Mapping[str, Any]) -> int:
    table = _one(1, "table", args, named, None)
    texts = table.values() if isinstance(table, Mapping) else ()
    return len(args[0]) * max((len(text) for text in texts if isinstance(text, str)), default=1)


def _wrapped(args: Sequence[Any], named: Mapping[str, Any]) -> int:
    parting = _one(3, "wrapstring", args, named, "")
    return len(args[0]) * len(parting) if isinstance(args[0], str) and isinstance(parting, str) else 0


def _json(args: Sequence[Any], named: Mapping[str, Any]) -> int:
    """Whatever its depth: where it is indented, it is counted again while it is made."""
    width = _one(2, "indent", args, named, 0)
    width = len(width) if isinstance(width, str) else abs(width) if isinstance(width, int) else 0
    parting = sum(len(value) for value in _one(3, "separators", args, named, None) or () if isinstance(value, str))
    return weight(args[0], LARGEST) // EACH * (width + parting)


def _percent_made(text: str, values: Any) -> int:
    """Of `text % values`: every field may hold the longest value, padded by the widths in the text, or by the largest
    of the numbers where a width is a star."""
    if len(text) > SMALL:
        raise too_large(SMALL)
    widths = re.findall(r"(?:%[-+ #0]*|\)[-+ #0]*|\.)(\*|[0-9]+)", text)
    inner = list(values) if isinstance(values, tuple) else [values]
    inner += values.values() if isinstance(values, Mapping) else ()
    widest = max((abs(value) for value in inner if isinstance(value, int)), default=0)
    return sum(widest if width == "*" else int(width[:10]) for width in widths) + text.count("%") * max(
        (weight(value, LARGEST) for value in inner if not isinstance(value, Mapping) or value is not values), default=0
    )


def _formatted(args: Sequence[Any], named: Mapping[str, Any]) -> int:
    return _percent_made(args[0] if isinstance(args[0], str) else str(args[0]), named or tuple(args[1:]))


_MADE = {
    "center": _padded, "ljust": _padded, "rjust": _padded, "zfill": _padded, "batch": _grouped, "slice": _grouped,
    "indent": _indented, "expandtabs": _tabs, "replace": _replaced, "join": _joined, "split": _split,
    "rsplit": _split, "splitlines": _split_lines, "translate": _translated, "wordwrap": _wrapped, "tojson": _json,
    "format": _formatted,
}  # fmt: skip


def operation_made(operator: str, left: Any, right: Any) -> int:
    """The characters of a product or a format; of numbers, whether they may be computed with."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MOST_BITS:
            raise Endless("computes with numbers that are too large")
    elif operator == "%" and isinstance(left, str):
        return _percent_made(left, right)
    elif operator == "*":
        values, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(values, Sized) and isinstance(times, int):
            return len(values) * times * (1 if isinstance(values, str) else EACH)
    return 0


class Formatter(jinja2.sandbox.SandboxedFormatter):
    """A text's format, field by field: what it makes is counted as it grows, and a width before it is used."""

    def __init__(self, environment: Any, allow: Callable[[int], None], **more: Any):
        super().__init__(environment, **more)
        self.allow, self.total = allow, 0

    def format_field(self, value: Any, spec: str) -> Any:
        self.allow(self.total + sum(int(width[:10]) for width in re.findall("[0-9]+", spec)))
        text = super().format_field(value, spec)
        self.total += len(text)
        self.allow(self.total)
        return text


class EscapeFormatter(Formatter, jinja2.sandbox.SandboxedEscapeFormatter):
    pass
