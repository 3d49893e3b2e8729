"""Files of a run folder, opened as files of a stranger: a folder may have been copied from anywhere.

A name is opened without following a link, only if it is a regular file (a pipe would hang the server), and at most so
many bytes of it are read. Links are the only way out of a folder for names that we chose ourselves, so refusing them
keeps every read inside it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graftune.io.json_file import no_collections

LARGEST = 64 << 20  # bytes of a document that is read whole


@contextmanager
def opened(path: str | Path) -> Iterator[int]:
    """A handle of a regular file, which is not a link. OSError where there is none."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{os.path.basename(path)} is not a file")
        yield handle
    finally:
        os.close(handle)


def read_bytes(path: str | Path, most: int = LARGEST) -> bytes | None:
    """The content, or None if there is no such file or it is larger than `most`."""
    try:
        with opened(path) as handle:
            if os.fstat(handle).st_size > most:
                return None
            return _all(handle, most)
    except OSError:
        return None


def _all(handle: int, most: int) -> bytes:
    parts, left = [], most
    while left and (part := os.read(handle, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_json(path: Path, most: int = LARGEST) -> Any:
    """The document in a file; None if there is none, or none that can be read."""
    content = read_bytes(path, most)
    if content is None:
        return None
    try:
        with no_collections():
            return json.loads(content)
    except (ValueError, RecursionError):
        return None


def stamp(path: str | Path) -> tuple[int, int, int]:
    """What changes when a file does: its number, size and time. Zeros where there is no file."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return (0, 0, 0)
    if not stat.S_ISREG(found.st_mode):
        return (0, 0, 0)
    return found.st_ino, found.st_size, found.st_mtime_ns
