"""Lines of a file that grows, read from another process: only what was appended since the last look.

What stands after the last newline is still being written and waits. A line longer than any event of ours is passed
over, so that what is held of a file is bounded whatever it holds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from graftune.dashboard.reading import opened
from graftune.io.json_file import no_collections
from graftune.observe.events import Event, parsed

CHUNK = 1 << 18  # bytes read at once: decoding them lets no other thread run for some milliseconds
STREAMED = 1 << 14  # the same for a stream, of which there may be hundreds
LONGEST = 1 << 20  # bytes of a line; what is longer is no event of ours


class Follower:
    """A file that grows. `advance` reads the whole lines that are new since the last call."""

    SECONDS = 20.0  # after which a look ends; what is left is read at the next one

    def __init__(self, path: str | Path):
        self.path, self.offset, self.bad = path, 0, 0
        self.behind = False  # the last look ended before the file did
        self._file = 0  # number of the file that was read: another one has taken its place if it changes

    def advance(self) -> None:
        self.behind, end = False, time.monotonic() + self.SECONDS
        try:
            with opened(self.path) as handle:
                found = os.fstat(handle)
                if found.st_ino != self._file or found.st_size < self.offset:
                    self._file = found.st_ino
                    self.reset()
                if found.st_size > self.offset:
                    for piece in self._pieces(handle, found.st_size):
                        self.take(piece)
                        if time.monotonic() > end:
                            self.behind = self.offset < found.st_size
                            return
        except FileNotFoundError:
            if self._file:
                self._file = 0
                self.reset()
        except OSError:
            return  # a link, a folder, no permission: a run without events

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

    def reset(self) -> None:
        """Forget what was read: the file begins anew."""
        self.offset, self.bad = 0, 0

    def take(self, piece: bytes) -> None:
        raise NotImplementedError


def events_of(piece: bytes) -> list[Event | None]:
    """The event on each line, None where there is none."""
    with no_collections():
        try:  # one call for all of them is twice as fast
            found = json.loads(b"[" + piece[:-1].replace(b"\n", b",") + b"]")
        except (ValueError, RecursionError):
            found = []
        if len(found) != piece.count(b"\n"):  # or two values on a line, which only look like a list when joined
            return [parsed(line) for line in piece[:-1].split(b"\n")]
    return [each if isinstance(each, dict) and isinstance(each.get("event"), str) else None for each in found]


def appended(path: Path, offset: int) -> tuple[bytes, int, int]:
    """Some whole lines behind `offset`, where they begin (0 if the file has become shorter), and where to go on."""
    try:
        with opened(path) as handle:
            size = os.fstat(handle).st_size
            offset = offset if offset <= size else 0
            content = os.pread(handle, STREAMED, offset)
            if b"\n" not in content and len(content) == STREAMED:  # one long line
                content = os.pread(handle, LONGEST, offset)
                content = content[: content.find(b"\n") + 1] or content
            end = content.rfind(b"\n") + 1
            after = len(content) if not end and len(content) == LONGEST else end
            return content[:end], offset, offset + after
    except OSError:
        return b"", 0, 0
