"""Values of a file as JSON that every browser reads.

A run folder may come from anywhere: NaN and infinity become null (browsers refuse a document that contains one), deep
nesting is cut, and dates and other YAML values become text.
"""

from __future__ import annotations

import json
import math
from typing import Any

DEEPEST = 8  # lists and objects inside each other
CUT = "[cut]"


def json_safe(value: Any, depth: int = 0) -> Any:
    """A copy of a document that `to_bytes` accepts."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if value.bit_length() <= 64 else None
    if isinstance(value, dict | list | tuple) and depth >= DEEPEST:
        return CUT
    if isinstance(value, dict):
        return {str(name): json_safe(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(inner, depth + 1) for inner in value]
    return str(value)


def to_bytes(document: Any) -> bytes:
    """In ASCII, because a file may contain unpaired surrogates, which UTF-8 cannot encode."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
