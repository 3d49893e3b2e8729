"""Reads the lines that another process appends to a file: each call reads only what is new since the last one.

Text after the last newline is still being written and waits. A line longer than any event is skipped, so the memory
that is held of a file is bounded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from graftune.errors import GraftuneError
from graftune.io.files import open_plain

CHUNK = 1 << 18  # bytes read at once; decoding them blocks other threads for some milliseconds
LONGEST = 1 << 20  # bytes of a line


class LineReader:
    """`advance` passes new whole lines to `take`. Subclasses say what they keep, and forget it in `clear`."""

    SECONDS = 20.0  # after which `advance` returns; the next call goes on from there

    def __init__(self, path: str | Path, offset: int = 0):
        self.path, self.offset = path, offset
        self.bad = 0  # lines that are not events
        self.behind = False  # the last call returned before the end of the file
        self._inode = 0  # changes when another file takes this one's place
        self.clear()

    def clear(self) -> None:
        """Forget all lines: the run or the file begins again."""

    def take(self, piece: bytes) -> None:
        raise NotImplementedError

    def advance(self) -> None:
        self.behind, end = False, time.monotonic() + self.SECONDS
        try:
            with open_plain(self.path, follow=False) as file:
                handle = file.fileno()
                found = os.fstat(handle)
                if self._inode not in (0, found.st_ino) or found.st_size < self.offset:
                    self._restart()
                self._inode = found.st_ino
                for piece in self._pieces(handle, found.st_size):
                    self.take(piece)
                    if time.monotonic() > end:
                        self.behind = self.offset < found.st_size
                        return
        except FileNotFoundError:
            if self._inode:
                self._restart()
                self._inode = 0
        except (OSError, GraftuneError):
            return  # a link, a folder, no permission: a run without events

    def _restart(self) -> None:
        self.offset = self.bad = 0
        self.clear()

    def _pieces(self, handle: int, size: int) -> Iterator[bytes]:
        """Whole lines, a chunk at a time."""
        held = b""
        place = self.offset
        while place < size and (content := os.pread(handle, min(CHUNK, size - place), place)):
            place += len(content)
            held += content
            end = held.rfind(b"\n") + 1
            if end:
                piece, held = held[:end], held[end:]
                self.offset = place - len(held)
                yield piece
            elif len(held) > LONGEST:
                self.bad, self.offset, held = self.bad + 1, place, b""
