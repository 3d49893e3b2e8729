"""Seeded damage to bytes, to texts and to trees of JSON values. Everything here is a function of the generator that it
is given, so that an input is known by three words: seed, format, number.

A tree is damaged as a tree and written as JSON afterwards, so that most damages reach behind the parser. What no tree
of Python's can hold (a key twice, numbers of thousands of digits, NaN, nesting without end) stands in it as a marked
text that `dumped` replaces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Path = tuple[Any, ...]

NUMBERS = (
    0, 1, -1, 2, 3, 7, 31, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63,
    2**64 - 1, 2**64, -(2**31), -(2**63), 10**30, 10**400, 0.0, -0.0, 0.5, 1e308, -1e308, 1e-320,
)  # fmt: skip
TEXTS = (
    "", " ", "\0", "\n", "\r\n", "\x1b[2J\x1b[1;31mred\x1b[0m", "\x1b]0;title\x07", "\x9b31m", "a\u202egnp.exe",
    "\u2028", "[bold red]markup[/]", "[/]", "[link=file:///etc]x[/link]", "<script>alert(1)</script>", "\ud800",
    "../../../../etc/passwd", "/etc/passwd", "..", ".", "~/x", "C:\\x",
    "x" * 300, "a/" * 60, "é" * 2000, "%s%n{0.__class__}",
    "{{ 7*7 }}", "{% for", "NaN", "null", "1e999", "2026-13-45", "\u0130\u212a\ufb03", "👩\u200d👩" * 9,
    "\ufeff", "0" * 5000,
    "nan", "-inf", "0x10", "1_000", "\t",
)  # fmt: skip
DEEP = (40, 200, 990, 3000, 50_000)
RAW, TWICE = "@@raw:", "@@twice:"


def raws(draw: Random) -> str:
    """JSON that json.dumps would not write."""
    depth = draw.choice(DEEP)
    return draw.choice(
        (
            "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "-" + "9" * 4000, "[" * depth + "]" * depth,
            '{"a":' * depth + "0" + "}" * depth, "[" * depth, '"\\ud800"', '"\\u0000"', "[" + "0," * 3000 + "0]",
            "{" + ",".join(f'"k{i}":0' for i in range(500)) + "}", '"' + "\\n" * 3000 + '"', "tru", "'x'", "",
        )
    )  # fmt: skip


def any_value(draw: Random) -> Any:
    kind = draw.randrange(12)
    if kind < 4:
        return draw.choice(NUMBERS)
    if kind < 7:
        return draw.choice(TEXTS)
    if kind == 7:
        return RAW + raws(draw)
    if kind == 8:
        return [any_value(draw) for _ in range(draw.randrange(4))]
    if kind == 9:
        return {draw.choice(TEXTS): any_value(draw) for _ in range(draw.randrange(3))}
    return draw.choice((None, True, False))


def extreme(draw: Random) -> int:
    """A number that fits into 64 bits and into few other places."""
    return int(draw.choice(NUMBERS[:23])) & (2**64 - 1)


# Bytes.


def some_bytes(draw: Random, whole: bytes, times: int | None = None) -> bytes:
    """Bits flipped, numbers put in, pieces cut out, doubled, moved or joined, the end cut off or grown."""
    data = bytearray(whole)
    for _ in range(times or draw.choice((1, 1, 1, 2, 3, 8))):
        at, kind = draw.randrange(len(data) + 1), draw.randrange(11)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        elif kind in (2, 3):
            size = 8 if kind == 2 else 4
            data[at : at + size] = extreme(draw).to_bytes(8, "little")[:size]
        elif kind == 4:
            del data[at : at + draw.choice((1, 2, 4, 8, 64, 1000))]
        elif kind == 5:
            data[at:at] = data[at : at + draw.choice((1, 4, 8, 64, 500))]
        elif kind == 6:
            data[at:at] = bytes(draw.randrange(256) for _ in range(draw.choice((1, 4, 8, 16))))
        elif kind == 7:
            other = draw.randrange(len(data) + 1)
            data[at : at + 16] = data[other : other + 16]
        elif kind == 8:
            del data[at:]
        elif kind == 9:
            data += bytes(draw.choice((1, 8, 64, 5000)))
        else:
            data[at:at] = draw.choice(TEXTS).encode("utf-8", "surrogatepass")
    return bytes(data)


def some_text(draw: Random, text: str, words: Sequence[str] = TEXTS) -> str:
    """The same for characters, with `words` of a language put in."""
    for _ in range(draw.choice((1, 1, 2, 3, 6))):
        at, kind = draw.randrange(len(text) + 1), draw.randrange(6)
        size = draw.choice((1, 1, 2, 5, 20, 100))
        if kind == 0:
            text = text[:at] + text[at + size :]
        elif kind == 1:
            text = text[:at] + text[at : at + size] * draw.choice((2, 2, 3, 50)) + text[at + size :]
        elif kind == 2:
            other = draw.randrange(len(text) + 1)
            text = text[:at] + text[other : other + size] + text[at:]
        elif kind == 3:
            text = text[:at] + draw.choice(TEXTS) + text[at:]
        else:
            text = text[:at] + draw.choice(words) + text[at + (size if draw.random() < 0.3 else 0) :]
    return text


# Trees.


def paths(tree: Any) -> list[Path]:
    """To every value, the tree itself among them."""
    found: list[Path] = [()]
    for path in found:
        value = at_path(tree, path)
        if isinstance(value, dict):
            found += [(*path, key) for key in value]
        elif isinstance(value, list | tuple):
            found += [(*path, i) for i in range(min(len(value), 40))]
    return found


def at_path(tree: Any, path: Path) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def edited(tree: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy with the value at `path` changed."""
    if not path:
        return change(tree)
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = edited(copy[path[0]], path[1:], change)
    return tuple(copy) if isinstance(tree, tuple) else copy


def some_tree(draw: Random, tree: Any, times: int | None = None) -> Any:
    """Values replaced, swapped, nudged or moved; keys left out, renamed or given twice; lists grown."""
    for _ in range(times or draw.choice((1, 1, 1, 2, 3))):
        places = paths(tree)
        path = draw.choice(places)
        tree = edited(tree, path, lambda value: _changed(draw, value, tree, places))  # noqa: B023 (used at once)
    return tree


def _changed(draw: Random, value: Any, tree: Any, places: list[Path]) -> Any:
    kind = draw.randrange(8)
    if kind == 0:
        return at_path(tree, draw.choice(places))
    if kind < 3:
        return any_value(draw)
    if isinstance(value, dict) and value:
        return _changed_keys(draw, value)
    if isinstance(value, list) and value:
        return _changed_list(draw, value, any_value(draw))
    if isinstance(value, bool) or value is None:
        return any_value(draw)
    if isinstance(value, int):
        return draw.choice(
            (
                value + 1,
                value - 1,
                -value,
                value * 2,
                value ^ (1 << draw.randrange(40)),
                float(value % 2**52),
                str(value),
            )
        )
    if isinstance(value, float):
        whole = round(value % 1e9) if abs(value) < 1e300 else 0
        return draw.choice((value * 1e9, -value, value / 1e300, whole, str(value)))
    if isinstance(value, str):
        return some_text(draw, value)
    return any_value(draw)


def _changed_list(draw: Random, value: list[Any], other: Any) -> list[Any]:
    at, copy, how = draw.randrange(len(value)), list(value), draw.randrange(4)
    if how == 0:
        del copy[at]
    elif how == 1:
        copy[at:at] = [copy[at]] * draw.choice((1, 2, 12, 40))
    elif how == 2:
        copy[at] = other
    else:
        copy.reverse()
    return copy


def some_fields(draw: Random, tree: Any) -> Any:
    """Numbers, bytes and names replaced by others of their type, lists grown or cut; tuples keep their length. So the
    tree can still be packed."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        path = draw.choice([found for found in paths(tree) if not isinstance(at_path(tree, found), dict)])
        tree = edited(tree, path, lambda value: _other_of_its_type(draw, value))
    return tree


def _other_of_its_type(draw: Random, value: Any) -> Any:
    if isinstance(value, int):
        return draw.choice((extreme(draw), draw.randrange(48), value + 1, value - 1, value + 32, value * 2))
    if isinstance(value, str):
        return draw.choice((*TEXTS, "F8_E4M3", "I64", "U8", "BOOL", "F4", "F6_E2M3", "C64", "F64", "BF16"))
    if isinstance(value, bytes):
        return draw.choice((some_bytes(draw, value, 1), draw.choice(TEXTS).encode("utf-8", "surrogatepass")))
    if isinstance(value, list) and value:
        return _changed_list(draw, value, draw.choice(value))
    return value


def _changed_keys(draw: Random, value: dict[str, Any]) -> dict[str, Any]:
    copy, key = dict(value), draw.choice(list(value))
    how = draw.randrange(5)
    if how == 0:
        del copy[key]
    elif how == 1:
        copy[draw.choice((*TEXTS, *value))] = copy.pop(key)
    elif how == 2:
        copy[f"{TWICE}{key}"] = any_value(draw)
    elif how == 3:
        copy[draw.choice(TEXTS)] = any_value(draw)
    else:
        other = draw.choice(list(value))
        copy[key], copy[other] = copy[other], copy[key]
    return copy


def dumped(tree: Any, **how: Any) -> bytes:
    """As JSON, marked texts replaced by what they stand for."""
    raw: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, str) and value.startswith(RAW):
            raw.append(value.removeprefix(RAW))
            return f"{RAW}{len(raw) - 1}@@"
        if isinstance(value, dict):
            return {key: marked(inner) for key, inner in value.items()}
        return [marked(inner) for inner in value] if isinstance(value, list) else value

    text = json.dumps(marked(tree), **how).replace(f'"{TWICE}', '"')
    for place, content in enumerate(raw):
        text = text.replace(f'"{RAW}{place}@@"', content)
    return text.encode("utf-8", "surrogatepass")


def some_json(draw: Random, tree: Any) -> bytes:
    """A tree damaged as one; now and then its text, too."""
    made = dumped(some_tree(draw, tree))
    if draw.random() < 0.1:
        made = some_bytes(draw, made)
    return draw.choice(LARGE)(draw) if draw.random() < 0.002 else made


def _many(draw: Random, piece: str, opening: str = "[", closing: str = "]") -> bytes:
    return (opening + ",".join([piece] * draw.choice((10_000, 100_000))) + closing).encode()


# Files of a megabyte in which little text makes many values: what memory costs per byte shows in them.
LARGE: tuple[Callable[[Random], bytes], ...] = (
    lambda draw: _many(draw, "[]"),
    lambda draw: _many(draw, "{}"),
    lambda draw: _many(draw, '{"":0}'),
    lambda draw: _many(draw, '{"a":[]}', '{"event":"step","step":1,"x":[', "]}"),
    lambda draw: ("{" + ",".join(f'"{i}":{{}}' for i in range(draw.choice((10_000, 60_000)))) + "}").encode(),
    lambda draw: b'{"a":"' + b"\\u0041" * draw.choice((10_000, 200_000)) + b'"}',
)
