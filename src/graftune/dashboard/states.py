"""The state of a run, from its folder alone: its log, and the lock that its process holds.

The lock is never taken, or a resume at that moment would be refused. Its file says who holds it (lock.py): process,
machine and the process's own start, so that a number which the system gave to another process is not mistaken for the
run's; and its own number, so that a copy of the folder is not. On this machine the process is looked up; a run of
another machine, on a shared disk or copied from there, is alive as long as its heartbeat (the time of the lock's file,
renewed every 5 seconds) is at most 15 seconds old.
"""

from __future__ import annotations

import shlex
import signal
import time
from pathlib import Path
from typing import NamedTuple

from graftune.dashboard.glance import Glance
from graftune.dashboard.reading import read_bytes, stamp
from graftune.errors import one_line
from graftune.io.lock import LOCK, LockOwner

SILENT = 15.0  # seconds without a heartbeat after which a run on another machine has died
PHASES = ("preparing", "compiling", "training", "evaluating", "finalising")
RUNNING = frozenset(PHASES)
CONFIG = "config.yaml"
PREPARING = "the data is read, memory is planned and the base is loaded"


class State(NamedTuple):
    state: str  # one of PHASES, finished, stopped or died
    sentence: str


class Pulse:
    """Whether the process of a run lives. The heartbeat of another machine is timed by our own clock as soon as it has
    been seen to move, since the two clocks may differ."""

    def __init__(self, folder: Path):
        self.path = folder / LOCK
        self._beat, self._seen = 0, 0.0

    def holder(self) -> LockOwner | None:
        """Who holds the lock, as far as is known; None if nobody does."""
        content = read_bytes(self.path, 4096)
        found = LockOwner.read(content) if content else None
        if found is None:
            return None
        try:
            file = self.path.stat(follow_symlinks=False)
        except OSError:
            return None
        if found.is_here:
            return found if found.file in (0, file.st_ino) and found.lives else None
        return found if self._beats(file.st_mtime_ns) else None

    def _beats(self, beat: int) -> bool:
        now = time.monotonic()
        if beat != self._beat:
            first = self._beat == 0
            self._beat = beat
            # At the first look only the two clocks can be compared.
            self._seen = now - (max(0.0, time.time() - beat / 1e9) if first else 0.0)
        return now - self._seen <= SILENT


def state_of(folder: Path, log: Glance, holder: LockOwner | None) -> State:
    """`holder`: of the run's lock, None if it is free."""
    if holder is not None and log.events and _taken_up(log, holder):
        return State("preparing", f"a resume is being prepared, at {_done(log)}: {PREPARING}")
    if log.end:
        return _ended(folder, log)
    if holder is not None:
        return _running(log)
    if not log.events:
        what = "there is no event of a run in this folder" if log.offset or log.bad else "ended before its first event"
        return State("died", f"{what}, and no process is training in it")
    return State("died", f"its process ended at {_done(log)} without a last word; {_again(folder)}")


def _ended(folder: Path, log: Glance) -> State:
    """By what the log's last event says. Only a run that came to its end is finished."""
    stopped, done = one_line(str(log.end.get("stopped")), longest=60), _done(log)
    if stopped == "finished":
        return State("finished", f"finished at {done}{_best(log)}")
    if stopped == "early stop":
        return State("finished", f"stopped early at {done}, because validation loss no longer fell{_best(log)}")
    why = {
        "interrupted": f"stopped by {_signal(log)} at {done}",
        "not finite": f"stopped itself at {done}: updates in a row were skipped because numbers were not finite",
        "warning": f"stopped itself at {done}, as stop_on_warning asks; its last warning says why",
    }
    return State("stopped", f"{why.get(stopped, f'stopped at {done} ({stopped})')}; {_again(folder)}")


def _running(log: Glance) -> State:
    phase = log.phase if log.phase in PHASES else ("training" if log.step else "preparing")
    done = _done(log)
    said = {
        "preparing": PREPARING,
        "compiling": "kernels are compiled and the first step is captured",
        "training": f"training, {done} done" if log.steps else "the first step is under way",
        "evaluating": f"validating at {done}",
        "finalising": f"writing the result and answering sample prompts after {done}",
    }
    return State(phase, said[phase])


def _taken_up(log: Glance, holder: LockOwner) -> bool:
    """Whether somebody has the run's lock since its last event: a resume that has not begun to write."""
    return log.updated is not None and holder.since > log.updated


def _again(folder: Path) -> str:
    if stamp(folder / CONFIG) == (0, 0, 0):
        return f"it cannot be resumed, since the folder has no {CONFIG}"
    return f"go on with: graftune train --resume {shlex.quote(str(folder))}"


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
