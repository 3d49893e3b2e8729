"""The state of a run, from its folder alone: its log, and the lock that its process holds.

The lock is never taken, or a resume at that moment would be refused. Its file says who holds it (lock.py): process,
machine and the process's own start, so that a number which the system gave to another process is not mistaken for the
run's. On this machine the process is looked up; a run of another machine, on a shared disk or copied from there, is
alive as long as its heartbeat (the time of the lock's file, renewed every 5 seconds) is at most 15 seconds old.
"""

from __future__ import annotations

import shlex
import signal
import time
from pathlib import Path
from typing import NamedTuple

from graftune.dashboard.glance import Glance
from graftune.dashboard.log import number
from graftune.dashboard.reading import read_bytes
from graftune.lock import LOCK, Holder

SILENT = 15.0  # seconds without a heartbeat after which a run on another machine has died
PHASES = ("preparing", "compiling", "training", "evaluating", "finalising")
RUNNING = frozenset(PHASES)


class State(NamedTuple):
    state: str  # one of PHASES, finished, stopped or died
    sentence: str


class Pulse:
    """Whether the process of a run lives. The heartbeat of another machine is timed by our own clock as soon as it has
    been seen to move, since the two clocks may differ."""

    def __init__(self, folder: Path):
        self.path = folder / LOCK
        self._beat, self._seen = 0, 0.0

    def holder(self) -> Holder | None:
        """Who holds the lock, as far as is known; None if nobody does."""
        content = read_bytes(self.path, 4096)
        found = Holder.read(content) if content else None
        if found is None:
            return None
        if found.is_here:
            return found if found.lives else None
        return found if self._beats() else None

    def _beats(self) -> bool:
        try:
            beat = self.path.stat(follow_symlinks=False).st_mtime_ns
        except OSError:
            return False
        now = time.monotonic()
        if beat != self._beat:
            first = self._beat == 0
            self._beat = beat
            # At the first look only the two clocks can be compared.
            self._seen = now - (max(0.0, time.time() - beat / 1e9) if first else 0.0)
        return now - self._seen <= SILENT


def state_of(folder: Path, log: Glance, holder: Holder | None) -> State:
    """`holder`: of the run's lock, None if it is free."""
    done, again = _done(log), f"go on with: graftune train --resume {shlex.quote(str(folder))}"
    if log.end and not _taken_up(log, holder):
        stopped = str(log.end.get("stopped"))
        if stopped == "interrupted":
            return State("stopped", f"stopped by {_signal(log)} at {done}; {again}")
        if stopped == "early stop":
            return State("finished", f"stopped early at {done}, because validation loss no longer fell{_best(log)}")
        return State("finished", f"finished at {done}{_best(log)}")
    if holder is not None:
        return _running(log, done)
    if not log.events:
        what = "there is no event of a run in this folder" if log.offset or log.bad else "ended before its first event"
        return State("died", f"{what}, and no process is training in it")
    return State("died", f"its process ended at {done} without a last word; {again}")


def _running(log: Glance, done: str) -> State:
    phase = log.phase if log.phase in PHASES else ("training" if log.step else "preparing")
    if log.end:  # a resume that has not begun to write
        phase = "preparing"
    said = {
        "preparing": "the data is read, memory is planned and the base is loaded",
        "compiling": "kernels are compiled and the first step is captured",
        "training": f"training, {done} done" if log.steps else "the first step is under way",
        "evaluating": f"validating at {done}",
        "finalising": f"writing the result and answering sample prompts after {done}",
    }
    return State(phase, said[phase])


def _taken_up(log: Glance, holder: Holder | None) -> bool:
    """Whether somebody has the run's lock since it ended: a resume that is being prepared."""
    ended = number(log.end.get("time"))
    return holder is not None and ended is not None and holder.since > ended


def _done(log: Glance) -> str:
    return f"step {log.steps}" + (f" of {log.total}" if log.total else "")


def _best(log: Glance) -> str:
    loss, step = log.best()
    return "" if loss is None else f"; the best validation loss was {loss:.4g}, at step {step}"


def _signal(log: Glance) -> str:
    which = log.end.get("signal")
    try:
        return signal.Signals(which).name if which else "a signal"
    except ValueError:
        return "a signal"
