"""Computes digests of large files (a base, a data set) and stores them: hashing tens of gigabytes takes tens of
seconds at every start.

A file counts as unchanged while its path, size, inode and times are the same, including the time of its last status
change: new content under the old modification time is still noticed. Digests of recently changed files are not stored,
since file systems have coarse clocks, and digests of small files are not worth storing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from graftune.io import user_cache
from graftune.io.files import open_plain

SMALLEST = 1 << 24  # bytes, of all files together
SETTLED = 2.0  # seconds since the last change
MOST = 200  # digests kept

State = list[tuple[str, int, int, int, tuple[int, int]]]  # of each file: its place, size, device, inode and times


def sha256(files: Sequence[Path]) -> str:
    before = _state(files)
    if sum(size for _, size, *_ in before) < SMALLEST:
        return _computed(files)
    key = json.dumps(before)
    known = user_cache.recall("digests").get(key)
    if isinstance(known, str):
        return known
    found = _computed(files)
    if _state(files) == before and _is_settled(before):
        user_cache.remember("digests", key, found, MOST)
    return found


def _computed(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with open_plain(file) as handle:
            while piece := handle.read(1 << 22):
                digest.update(piece)
    return digest.hexdigest()


def _is_settled(state: State) -> bool:
    return time.time() - max(max(times) for *_, times in state) / 1e9 > SETTLED


def _state(files: Sequence[Path]) -> State:
    found = []
    for file in files:
        stat = file.stat()
        times = (stat.st_mtime_ns, stat.st_ctime_ns)
        found.append((str(file.resolve()), stat.st_size, stat.st_dev, stat.st_ino, times))
    return found
