"""The digest of a base's files, remembered: tens of gigabytes take tens of seconds, at every run and every adapter.

A file is taken for unchanged while its place, size, inode and times are the same, the time of its last change of state
among them: contents put in its place under the old modification time are still seen. What was changed a moment ago is
not remembered, since clocks of file systems are coarse, and small files are not worth it. Digests lie in one small file
in the user's cache folder; if that is unreadable, damaged or cannot be written, they are computed again, no more.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SMALLEST = 1 << 24  # bytes, of all files together
SETTLED = 2.0  # seconds since the last change
MOST = 200  # digests kept


def cache_folder() -> Path:
    """GRAFTUNE_CACHE, or graftune in the user's cache folder."""
    if own := os.environ.get("GRAFTUNE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graftune"


def sha256(files: Sequence[Path]) -> str:
    """Of the files' bytes, one behind the other."""
    before = _state(files)
    if sum(size for _, size, *_ in before) < SMALLEST:
        return _computed(files)
    key = json.dumps(before)
    known = _remembered().get(key)
    if known is not None:
        return known
    found = _computed(files)
    latest = max(max(times) for *_, times in before)
    if _state(files) == before and time.time() - latest / 1e9 > SETTLED:
        _remember(key, found)
    return found


def _computed(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            while piece := handle.read(1 << 22):
                digest.update(piece)
    return digest.hexdigest()


def _state(files: Sequence[Path]) -> list[tuple[str, int, int, int, tuple[int, int]]]:
    found = []
    for file in files:
        told = file.stat()
        times = (told.st_mtime_ns, told.st_ctime_ns)
        found.append((str(file.resolve()), told.st_size, told.st_dev, told.st_ino, times))
    return found


def _remembered() -> dict[str, str]:
    try:
        values = json.loads((cache_folder() / "digests.json").read_text())
        entries = list(values.items())
    except (OSError, ValueError, AttributeError, RuntimeError):  # the last: nested too deep, or nobody's home
        return {}
    return {k: v for k, v in entries if isinstance(v, str) and re.fullmatch("[0-9a-f]{64}", v)}


def _remember(key: str, value: str) -> None:
    """Written aside and renamed; of two who write at once, one is remembered."""
    kept = {**_remembered(), key: value}
    with suppress(OSError, RuntimeError):  # a full disk, no home, a folder of others: it costs time, nothing else
        place = cache_folder() / "digests.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        aside = place.with_name(f"digests-{os.getpid()}.part")
        try:
            aside.write_text(json.dumps(dict(list(kept.items())[-MOST:])))
            os.replace(aside, place)
        finally:
            aside.unlink(missing_ok=True)
