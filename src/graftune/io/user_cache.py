"""Keeps small results that took time to compute between runs: one JSON file per kind in the user's cache folder.

If a file is damaged or cannot be written, the result is computed again.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from graftune.io.files import write_file
from graftune.io.json_file import NotJson, read_object


def cache_folder() -> Path:
    """GRAFTUNE_CACHE, or graftune in the user's cache folder."""
    if own := os.environ.get("GRAFTUNE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graftune"


def recall(kind: str) -> dict[str, Any]:
    """All stored results of a kind. The caller checks their types: the file may have been damaged."""
    try:
        values = read_object(cache_folder() / f"{kind}.json")
    except (OSError, NotJson, RuntimeError):  # RuntimeError: the user has no home folder
        return {}
    return values


def remember(kind: str, key: str, value: Any, most: int) -> None:
    """Store a result and keep the latest `most` of its kind. Of two processes that write at once, one wins."""
    kept = {**recall(kind), key: value}
    with suppress(OSError, RuntimeError):  # a full disk, no home, a folder of others
        place = cache_folder() / f"{kind}.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        write_file(place, json.dumps(dict(list(kept.items())[-most:])), unique=True)
