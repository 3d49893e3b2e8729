"""Ctrl-C and SIGTERM of a run: the first is noted, so that the run can end at a whole step; a second acts at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted_signals(note: Callable[[int], None]) -> Iterator[None]:
    """While inside, `note` is called with the number of the first signal, in its handler."""

    def handler(number: int, frame: FrameType | None) -> None:
        note(number)
        for kind in previous:
            signal.signal(kind, signal.SIG_DFL)

    previous = {}
    try:
        for kind in (signal.SIGINT, signal.SIGTERM):
            previous[kind] = signal.signal(kind, handler)
    except ValueError:  # not the main thread (the Python API may be used from one): signals stay as they are
        previous = {}
    try:
        yield
    finally:
        for kind, before in previous.items():
            signal.signal(kind, before)
