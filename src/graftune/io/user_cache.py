"""Small facts that took time to find, remembered between runs: one JSON file a kind in the user's cache folder.

Whatever is unreadable, damaged or cannot be written is found again, no more: nothing but time hangs on it.
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
    """All that is remembered of a kind. Who reads it checks what a value is: the file may be anyone's."""
    try:
        values = read_object(cache_folder() / f"{kind}.json")
    except (OSError, NotJson, RuntimeError):  # the last: nobody's home
        return {}
    return values


def remember(kind: str, key: str, value: Any, most: int) -> None:
    """Beside the others, of which the latest `most` stay. Written aside and renamed; of two who write at once, one is
    remembered."""
    kept = {**recall(kind), key: value}
    with suppress(OSError, RuntimeError):  # a full disk, no home, a folder of others
        place = cache_folder() / f"{kind}.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        write_file(place, json.dumps(dict(list(kept.items())[-most:])), unique=True)
