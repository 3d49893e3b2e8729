"""config.yaml of many runs, read quickly.

YAML takes a millisecond or nine for one file, and a list may have a thousand that differ in two lines. As graftune
writes it, a file is sections of two-space keys; each key with its value is parsed as YAML by itself and remembered by
its text. A file that looks otherwise is parsed as a whole, with the limits of yaml_file.py. Nothing is checked against
the settings of this version: a run may be of another one.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

from graftune.dashboard.reading import read_bytes
from graftune.errors import GraftuneError
from graftune.io.yaml_file import LARGEST, parse_yaml

REMEMBERED = 500  # characters of a text that is remembered with what it means
_SECTION = re.compile(r"[a-z_]+:")
_PLAIN = re.compile(r"  ([a-z_]+): ([A-Za-z/][A-Za-z0-9_./-]*)")
_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "null", "y", "n"))  # which YAML takes for values
_WHOLE = re.compile(r"  ([a-z_]+): (0|-?[1-9][0-9]{0,17})")
_FIRST = re.compile(r"  [A-Za-z_]\w*:(\s|$)")


def settings_of(path: str) -> dict[str, Any]:
    """The settings by name, without their sections; none where the file is missing or is no YAML."""
    content = read_bytes(path, LARGEST)
    if content is None:
        return {}
    text = content.decode("utf-8-sig", "replace")
    try:
        parts = _parts(text)
        if parts is not None:
            return dict(map(_parsed, parts))
        return {str(name): _plain(value) for name, value in _flat(parse_yaml(text, "config.yaml")).items()}
    except GraftuneError:
        return {}


def _parts(text: str) -> list[str] | None:
    """Each key with its value; None if the file is not as graftune writes it."""
    parts: list[str] = []
    in_section = False
    for line in text.split("\n"):
        kind = _kind(line)
        if kind == "first" and in_section:
            parts.append(line)
        elif kind == "section":
            in_section = True
        elif kind == "more" and parts:
            parts[-1] += "\n" + line
        elif kind != "nothing":
            return None
    return parts if all(_parsed(part)[0] for part in parts) else None


def _kind(line: str) -> str:
    return _kind_of_short(line) if len(line) <= REMEMBERED else _kind_of_short.__wrapped__(line)


@functools.lru_cache(maxsize=8192)
def _kind_of_short(line: str) -> str:
    if not line or line.startswith("#") or line == "  {}":
        return "nothing"
    if _SECTION.fullmatch(line):
        return "section"
    if _FIRST.match(line):
        return "first"
    return "more" if line.startswith(("   ", "  - ")) else "other"


def _parsed(part: str) -> tuple[str, Any]:
    """The key and its value; no key where they cannot be read by themselves."""
    return _parsed_short(part) if len(part) <= REMEMBERED else _parsed_short.__wrapped__(part)


@functools.lru_cache(maxsize=8192)
def _parsed_short(part: str) -> tuple[str, Any]:
    plain = _PLAIN.fullmatch(part)
    if plain and plain[2].lower() not in _WORDS:  # most of what differs among runs are paths and seeds
        return plain[1], plain[2]
    if whole := _WHOLE.fullmatch(part):
        return whole[1], int(whole[2])
    try:
        found = parse_yaml(part, "config.yaml")
    except GraftuneError:
        return "", None
    if len(found) != 1:
        return "", None
    ((name, value),) = found.items()
    return str(name), _plain(value)


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(value if isinstance(value, dict) and name != "map" else {name: value})
    return flat


def _plain(value: Any, depth: int = 0) -> Any:
    """As JSON holds it: dates and what else YAML knows become text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth < 8 and isinstance(value, dict):
        return {str(name): _plain(inner, depth + 1) for name, inner in value.items()}
    if depth < 8 and isinstance(value, list | tuple):
        return [_plain(inner, depth + 1) for inner in value]
    return str(value)
