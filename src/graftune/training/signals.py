"""Ctrl-C, SIGTERM and SIGHUP (a closed terminal, a dropped connection) of a run.

While a run trains, the first signal is noted, so that the run can end at a whole step. A thread sees to the rest,
because Python hands a signal to the main thread, which may be amid a long product or wait for a device: a second Ctrl-C
ends the process at once and says what is lost; and if the run does not come to an end of its micro-batch, its
evaluation or its answers in time, the main thread is told to give them up. A launcher passes signals on to processes
that may have had them already, and ends them itself if they take too long: of several ranks none acts on a second one.
While a run is prepared there is nothing to save: the signal is raised, as Python does with Ctrl-C, and what was made so
far is taken away. A signal that is ignored (nohup) stays so. A second SIGTERM or SIGHUP changes nothing: schedulers
repeat them, and a terminal that closes sends SIGHUP twice; so does a second SIGINT in the same moment, from a wrapper
that passes it on. SIGSTOP cannot be seen; SIGCONT can, and the time between is found by how long the thread has slept.
"""

from __future__ import annotations

import _thread
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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


class Stopping:
    """What becomes of signals while a run trains.

    `note` is called with the first one, in its handler. `overdue` is called in the main thread `within` seconds later,
    if this is still open (0: never). `lost` says what a second Ctrl-C loses, from another thread. `continued` is called
    with the seconds for which the process was stopped."""

    TICK = 1.0  # seconds between two looks at the clock
    SAME = 0.5  # seconds within which a second SIGINT is the first one, passed on

    def __init__(
        self,
        note: Callable[[int], None],
        *,
        within: float = 0.0,
        overdue: Callable[[], None] = lambda: None,
        lost: Callable[[], str] = lambda: "",
        continued: Callable[[float], None] = lambda seconds: None,
        once: bool = False,
    ) -> None:
        self._note, self._within, self._overdue, self._lost = note, within, overdue, lost
        self._continued, self._once = continued, once
        self._first = self._late = False
        self._ticks = (0.0, 0.0)  # the last two times at which the thread was awake
        self._closed = False

    def __enter__(self) -> Stopping:
        self._stack = ExitStack()
        if threading.current_thread() is not threading.main_thread():
            return self  # the Python API may be used from another thread: signals stay as they are
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._stack.callback(signal.set_wakeup_fd, before)
        self._kinds = [kind for kind in KINDS if signal.getsignal(kind) is not signal.SIG_IGN]
        for kind in self._kinds:
            self._stack.callback(signal.signal, kind, signal.signal(kind, self._handle))
        self._stack.callback(signal.signal, signal.SIGCONT, signal.signal(signal.SIGCONT, self._on_continued))
        self._ticks = (time.monotonic(),) * 2
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        self._stack.callback(self._close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _close(self) -> None:
        self._closed = True
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    # In the main thread

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._first:
            self._first = True
            self._note(number)
        elif self._late:
            self._overdue()

    def _on_continued(self, number: int, frame: FrameType | None) -> None:
        now, (before, last) = time.monotonic(), self._ticks  # the thread may have woken first
        asleep = max(now - last, last - before) - self.TICK
        if asleep > self.TICK:
            self._continued(asleep)

    # In the thread

    def _watch(self) -> None:
        first, came, calls = 0, 0.0, 0
        while not self._closed:
            ready, _, _ = select.select([self._read], [], [], self.TICK)
            now = time.monotonic()
            self._ticks = (self._ticks[1], now)
            for number in os.read(self._read, 64) if ready else b"":
                if number not in self._kinds:
                    continue
                if calls:  # made by this thread
                    calls -= 1
                elif not first:
                    first, came = number, now
                elif number == signal.SIGINT and not self._once and now - came > self.SAME:
                    self._end(number)
            if first and self._within and now - came >= self._within:
                # Again and again: what is not to be given up now may be followed by what is.
                self._late, calls = True, calls + 1
                _thread.interrupt_main(signal.Signals(first))

    def _end(self, number: int) -> None:
        with suppress(OSError):  # the terminal may be what has gone
            os.write(2, f"\ngraftune: stopped at once; {self._lost()}\n".encode())
        os._exit(128 + number)
