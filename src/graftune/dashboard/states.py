"""The state of a run, from its folder alone: its log, and the lock file that its process holds.

The lock is never taken here, because a resume at that moment would be refused. The lock file names its holder (lock.py)
by process, machine, process start and inode, so a later process with the same number and a copy of the folder do not
count. On this machine the process is looked up. A run of another machine is alive while the modification time of its
lock file, which is renewed every 5 seconds, is at most 15 seconds old.
"""

from __future__ import annotations

import shlex
import signal
import time
from pathlib import Path
from typing import NamedTuple

from graftune.dashboard.reading import is_file, read_bytes
from graftune.dashboard.summary import RunSummary
from graftune.errors import one_line
from graftune.io.lock import LOCK, LockOwner

SILENT = 15.0  # seconds without a heartbeat after which a run on another machine has died
PHASES = ("preparing", "compiling", "sampling", "training", "evaluating", "finalising")
RUNNING = frozenset(PHASES)
CONFIG = "config.yaml"
PREPARING = "the data is read, memory is planned and the base is loaded"


class RunStatus(NamedTuple):
    state: str  # one of PHASES, finished, stopped or died
    sentence: str


class Heartbeat:
    """Says whether the process of a run is alive. Once the heartbeat of another machine has been seen to change, this
    machine's clock measures its age, since the two clocks may differ."""

    def __init__(self, folder: Path):
        self.path = folder / LOCK
        self._beat, self._seen = 0, 0.0

    def holder(self) -> LockOwner | None:
        """The holder of the lock; None if it is free or its process is dead."""
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
        return found if self._is_recent(file.st_mtime_ns) else None

    def _is_recent(self, beat: int) -> bool:
        now = time.monotonic()
        if beat != self._beat:
            first = self._beat == 0
            self._beat = beat
            # The first time, only the two clocks can be compared.
            self._seen = now - (max(0.0, time.time() - beat / 1e9) if first else 0.0)
        return now - self._seen <= SILENT


def state_of(folder: Path, log: RunSummary, holder: LockOwner | None) -> RunStatus:
    """`holder`: of the run's lock, None if it is free."""
    if holder is not None and log.has_events and log.updated is not None and holder.since > log.updated:
        return RunStatus("preparing", f"a resume is being prepared, at {_done(log)}: {PREPARING}")
    if log.end:
        return _ended(folder, log)
    if holder is not None:
        return _running(log)
    if not log.has_events:
        what = "there is no event of a run in this folder" if log.offset or log.bad else "ended before its first event"
        return RunStatus("died", f"{what}, and no process is training in it")
    return RunStatus("died", f"its process ended at {_done(log)} without a final event; {_resume(folder)}")


def _ended(folder: Path, log: RunSummary) -> RunStatus:
    """The state by the log's last event. Only a run that completed its steps or stopped early is finished."""
    stopped, done = one_line(str(log.end.get("stopped")), longest=60), _done(log)
    if stopped == "finished":
        return RunStatus("finished", f"finished at {done}{_best(log)}")
    if stopped == "early stop":
        return RunStatus("finished", f"stopped early at {done}, because validation no longer improved{_best(log)}")
    why = {
        "interrupted": f"stopped by {_signal(log)} at {done}",
        "not finite": f"stopped itself at {done}: updates in a row were skipped because numbers were not finite",
        "warning": f"stopped itself at {done}, as stop_on_warning asks; its last warning says why",
    }
    return RunStatus("stopped", f"{why.get(stopped, f'stopped at {done} ({stopped})')}; {_resume(folder)}")


def _running(log: RunSummary) -> RunStatus:
    phase = log.phase if log.phase in PHASES else ("training" if log.step else "preparing")
    done = _done(log)
    sentences = {
        "preparing": PREPARING,
        "compiling": "kernels are compiled and the first step is captured",
        "sampling": f"answers are sampled and rewarded, {done} done",
        "training": f"training, {done} done" if log.steps else "the first step is under way",
        "evaluating": f"validating at {done}",
        "finalising": f"writing the result and answering sample prompts after {done}",
    }
    return RunStatus(phase, sentences[phase])


def _resume(folder: Path) -> str:
    if not is_file(folder / CONFIG):
        return f"it cannot be resumed, since the folder has no {CONFIG}"
    return f"go on with: graftune train --resume {shlex.quote(str(folder))}"


def _done(log: RunSummary) -> str:
    return f"step {log.steps}" + (f" of {log.total}" if log.total else "")


def _best(log: RunSummary) -> str:
    loss, step = log.best()
    return "" if loss is None else f"; the best validation loss was {loss:.4g}, at step {step}"


def _signal(log: RunSummary) -> str:
    return {known.value: known.name for known in signal.Signals}.get(log.end.get("signal", 0), "a signal")
