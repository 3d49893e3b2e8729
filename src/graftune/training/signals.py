"""Ctrl-C, SIGTERM and SIGHUP (a closed terminal, a dropped connection) of a run.

While a run trains, the first signal is noted, so that the run can end at a whole step; a second one acts at once. A
launcher passes signals on to processes that may have had them already, and ends them itself if they take too long: of
several ranks none acts on a second one. While a run is prepared there is nothing to save: the signal is raised, as
Python does with Ctrl-C, and what was made so far is taken away. A signal that is ignored (nohup) stays so.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

KINDS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))

HANGUP = getattr(signal, "SIGHUP", 0)  # after which there may be nobody to write to


class Stopped(BaseException):
    """A signal before the first step. No `except Exception` of a library may keep it."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@contextmanager
def noted_signals(note: Callable[[int], None], *, once: bool = False) -> Iterator[None]:
    """While inside, `note` is called with the number of the first signal, in its handler. `once`: others do nothing."""

    def handler(number: int, frame: FrameType | None) -> None:
        for kind in previous:
            signal.signal(kind, signal.SIG_IGN if once else signal.SIG_DFL)
        note(number)

    previous = {}
    try:
        for kind in KINDS:
            if signal.getsignal(kind) is not signal.SIG_IGN:
                previous[kind] = signal.signal(kind, handler)
    except ValueError:  # not the main thread (the Python API may be used from one): signals stay as they are
        previous = {}
    try:
        yield
    finally:
        for kind, before in previous.items():
            signal.signal(kind, before)


@contextmanager
def raised_signals(*, once: bool = False) -> Iterator[None]:
    """While inside, the first signal raises `Stopped`."""

    def raising(number: int) -> None:
        raise Stopped(number)

    with noted_signals(raising, once=once):
        yield
