"""What a file of a stranger may hold, cut to what is kept and sent: so many values, so many characters, so deep.

An event or a setting of ours is far below these limits. One that is not may be a million names on one line, or a list
in a list in a list; it is shown as far as it goes. Numbers that JSON does not know (NaN, and 1e999, which is read as
infinity) become null: browsers refuse a whole document that holds one.
"""

from __future__ import annotations

import json
import math
from typing import Any

VALUES, CHARACTERS, DEEPEST = 5000, 256 << 10, 8
CUT = "[cut]"


class Cut:
    """A copy of a document within limits. `size` is about how many bytes it takes, as JSON."""

    def __init__(self, document: Any, values: int = VALUES, characters: int = CHARACTERS):
        self._values, self._characters = values, characters
        self.document = self._copy(document, 0)
        self.size = 8 * (values - self._values) + characters - self._characters

    def _copy(self, value: Any, depth: int) -> Any:
        self._values -= 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, int):
            return value if value.bit_length() <= 64 else None
        if depth >= DEEPEST or self._values <= 0:
            return CUT
        if isinstance(value, dict):
            made: dict[str, Any] = {}
            for name, inner in value.items():
                if self._values <= 0 or self._characters < 0:
                    break
                key = self._text(str(name))
                made[key] = self._copy(inner, depth + 1)
            return made
        return self._items(value, depth) if isinstance(value, list | tuple) else self._text(str(value))

    def _items(self, values: list[Any] | tuple[Any, ...], depth: int) -> list[Any]:
        made: list[Any] = []
        for inner in values:
            if self._values <= 0:
                break
            made.append(self._copy(inner, depth + 1))
        return made

    def _text(self, text: str) -> str:
        kept = text if len(text) <= self._characters else f"{text[: max(0, self._characters)]} {CUT}"
        self._characters -= len(text)
        return kept


def cut(document: Any, values: int = VALUES, characters: int = CHARACTERS) -> Any:
    return Cut(document, values, characters).document


def to_bytes(document: Any) -> bytes:
    """As JSON that browsers read, in ASCII: halves of characters, which a file may hold, would be no UTF-8."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
