"""Ctrl-C, SIGTERM and SIGHUP (a closed terminal, a dropped connection) of a run.

While a run trains, the first signal is noted, so that the run ends after a whole step and saves it. A thread does the
rest, because Python delivers a signal to the main thread, which may be inside a long product or wait for a device: a
second Ctrl-C ends the process at once and prints what is lost; and if the run does not reach the end of its
micro-batch, evaluation or answers in time, the main thread gives them up. These change no weight, so that a resume
computes the same again; an update, a checkpoint and the adapter are always finished. A launcher passes signals on to
processes that may have received them already, and ends them itself if they take too long: with several ranks, no rank
acts on a second signal. While a run is prepared there is nothing to save: the signal is raised, as Python does with
Ctrl-C, and the files made so far are removed. A signal that is ignored (nohup) stays ignored. A second SIGTERM or
SIGHUP changes nothing: schedulers repeat them, and a terminal that closes sends SIGHUP twice; so does a second SIGINT
in the same moment, from a wrapper that passes it on.
"""

from __future__ import annotations

import _thread
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import FrameType

HANGUP = signal.SIGHUP  # after which the terminal may be gone
KINDS = (signal.SIGINT, signal.SIGTERM, HANGUP)


class Stopped(BaseException):
    """A signal came before the first step. A BaseException, so that no `except Exception` of a library catches it."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class Interrupted(Exception):
    """Raised between two micro-batches after a signal, or in work that has gone on for too long since the signal."""


class StopRequest:
    """The signal that asks a run to stop, and whether the present work may be given up for it."""

    def __init__(self) -> None:
        self.signal = 0
        self.may_give_up = False

    def note(self, number: int) -> None:
        """Called in a signal handler, which must not write to a stream that may be in use."""
        self.signal = number

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around work that a signal may end anywhere, because it changes no weight."""
        self.may_give_up = True
        try:
            yield
        finally:
            self.may_give_up = False


@contextmanager
def noted_signals(note: Callable[[int], None], *, once: bool = False) -> Iterator[None]:
    """Calls `note` with the number of the first signal, in its handler. `once`: later signals do nothing."""

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


def raised_signals(*, once: bool = False) -> AbstractContextManager[None]:
    """Raises `Stopped` at the first signal."""
    return noted_signals(_raise, once=once)


def _raise(number: int) -> None:
    raise Stopped(number)


class SignalWatch:
    """Handles signals while a run trains.

    `note` is called with the first one, in its handler. `overdue` is called in the main thread `within` seconds later,
    if this is still open (0: never). `confirm` is called at once with the first one, in a thread of its own: the main
    thread may be busy for seconds, and a terminal that does not take text must not hold up a second Ctrl-C. `lost`
    returns what a second Ctrl-C loses, and is called from another thread."""

    TICK = 1.0  # seconds between two looks at the clock
    SAME = 0.5  # seconds within which a second SIGINT is the first one, passed on

    def __init__(
        self,
        note: Callable[[int], None],
        *,
        within: float = 0.0,
        overdue: Callable[[], None] = lambda: None,
        confirm: Callable[[int], None] = lambda _: None,
        lost: Callable[[], str] = lambda: "",
        once: bool = False,
    ) -> None:
        self._note, self._within, self._overdue, self._lost = note, within, overdue, lost
        self._confirm = confirm
        self._once = once
        self._first = self._late = self._closed = False

    def __enter__(self) -> SignalWatch:
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

    # In the thread

    def _watch(self) -> None:
        first, came, calls = 0, 0.0, 0
        while not self._closed:
            ready, _, _ = select.select([self._read], [], [], self.TICK)
            now = time.monotonic()
            for number in os.read(self._read, 64) if ready else b"":
                if number not in self._kinds:
                    continue
                if calls:  # sent by this thread
                    calls -= 1
                elif not first:
                    first, came = number, now
                    threading.Thread(target=self._confirm, args=[number], name="confirm", daemon=True).start()
                elif number == signal.SIGINT and not self._once and now - came > self.SAME:
                    self._end(number)
            if first and self._within and now - came >= self._within:
                # Repeatedly: work that may not be given up now may be followed by work that may.
                self._late, calls = True, calls + 1
                _thread.interrupt_main(signal.Signals(first))

    def _end(self, number: int) -> None:
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f"\ngraftune: stopped at once; {self._lost()}\n".encode())
        os._exit(128 + number)
