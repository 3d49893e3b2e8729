"""Reads config.yaml of many runs quickly.

Parsing YAML takes 1 to 9 ms per file, and a list may have a thousand files that differ in two lines. As graftune writes
it, a file consists of sections of two-space keys; each key with its value is parsed by itself and cached by its text.
Any other file is parsed as a whole, within the limits of yaml_file.py. Nothing is checked against the settings of this
version: another version may have written the run.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from graftune.dashboard.reading import read_bytes
from graftune.errors import GraftuneError
from graftune.io.yaml_file import LARGEST, parse_yaml
from graftune.observe.events import plain

_KEY = re.compile(r"^  [A-Za-z_]\w*:(?:[ \t].*)?$(?:\n(?:   |  - ).*)*", re.M)  # with the lines of its value
_BETWEEN = re.compile(r"(?:#.*|[a-z_]+:|  \{\}|)")  # lines between keys: comments, sections
_PLAIN = re.compile(r"  ([a-z_]+): ([A-Za-z/][A-Za-z0-9_./-]*)")
_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "null", "y", "n"))  # YAML reads these as other types
_WHOLE = re.compile(r"  ([a-z_]+): (0|-?[1-9][0-9]{0,17})")


def settings_of(path: str) -> dict[str, Any]:
    """The settings by name, without their sections; empty where the file is missing or not YAML."""
    content = read_bytes(path, LARGEST)
    if content is None:
        return {}
    text = content.decode("utf-8-sig", "replace")
    try:
        if all(map(_BETWEEN.fullmatch, _KEY.sub("", text).split("\n"))):
            pairs = [_parsed(part) for part in _KEY.findall(text)]
            if all(name for name, _ in pairs):
                return dict(pairs)
        return plain(_flat(parse_yaml(text, "config.yaml")))
    except GraftuneError:
        return {}


@functools.lru_cache(maxsize=8192)
def _parsed(part: str) -> tuple[str, Any]:
    """The key and its value; no key where they cannot be read by themselves."""
    word = _PLAIN.fullmatch(part)
    if word and word[2].lower() not in _WORDS:  # paths and seeds, which differ most among runs
        return word[1], word[2]
    if whole := _WHOLE.fullmatch(part):
        return whole[1], int(whole[2])
    try:
        found = parse_yaml(part, "config.yaml")
    except GraftuneError:
        return "", None
    return next(iter(plain(found).items())) if len(found) == 1 else ("", None)


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(value if isinstance(value, dict) and name != "map" else {name: value})
    return flat
