"""Taking turns: workers boot beside each other, and while one is timed everyone else stands still.

A worker that is warm takes a lock, says so in a file and waits until the parent has answered; the parent answers when
every other worker, and every process group of a file that others may append to, is stopped (SIGSTOP), and lets them go
on when the turn is over. The lock is the kernel's (flock): a worker that dies gives it back. Stopping and not merely
waiting, because a boot compiles and loads for minutes on the same cores, memory and card; a stopped process keeps its
GPU memory and computes nothing once what it has launched is done.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TURNS = "STEP_TURNS"  # in a worker's environment: the folder of the lock and of what is said about it
POLL_S = 0.02
PROC = Path("/proc")
STILL = "TtZXx"  # states of a process that does not run: stopped, traced, dead


def said(folder: Path, pid: int, what: str) -> Path:
    """A worker `waits` for the lock, `asks` once it has it, and is `granted` its turn by the parent."""
    return folder / f"{pid}.{what}"


@contextlib.contextmanager
def turn() -> Iterator[bool]:
    """In a worker: until it is its turn, and then the turn itself. False where nobody takes turns."""
    if not os.environ.get(TURNS):
        yield False
        return
    folder, parent = Path(os.environ[TURNS]), os.getppid()
    waits, asks, granted = (said(folder, os.getpid(), what) for what in ("waits", "asks", "granted"))
    waits.touch()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waits.rename(asks)
        try:
            while not granted.exists():
                if os.getppid() != parent:
                    raise SystemExit("the benchmark that was to grant a turn is gone")
                time.sleep(POLL_S)
            yield True
        finally:
            granted.unlink(missing_ok=True)
            asks.unlink(missing_ok=True)
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a forked child has the file open too


@dataclass(frozen=True)
class Process:
    state: str
    parent: int
    group: int
    session: int


def processes() -> dict[int, Process]:
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            found[int(entry.name)] = Process(fields[0], *map(int, fields[1:4]))
    return found


def members(groups: Iterable[int], table: dict[int, Process]) -> set[int]:
    """Everyone in the groups, and their descendants wherever those went."""
    wanted = set(groups)
    found = {pid for pid, process in table.items() if process.group in wanted or process.session in wanted}
    while more := {pid for pid, process in table.items() if process.parent in found} - found:
        found |= more
    return found


def listed(path: Path | None) -> set[int]:
    """The process groups of a pause file: one a line; a line that is still being written or is none is left out."""
    if path is None or not path.exists():
        return set()
    return {int(line) for line in path.read_text(errors="replace").splitlines() if line.strip().isdigit()} - {0, 1}


class Quiet:
    """Stops processes, and lets those go on that it has stopped."""

    def __init__(self) -> None:
        self.stopped: set[int] = set()

    def hold(self, groups: Iterable[int], but: int | None = None) -> bool:
        """Stops whoever still runs; True where nobody did. To be called again until it is, and while it is to stay so:
        processes are started meanwhile. The group `but` and this process are never stopped."""
        wanted = set(groups)
        if not wanted:
            return True
        table = processes()
        spared = members([but] if but else [], table) | {os.getpid()}
        running = [pid for pid in members(wanted, table) - spared if table[pid].state not in STILL]
        for pid in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
                self.stopped.add(pid)
        return not running

    def release(self) -> None:
        for pid in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped.clear()
