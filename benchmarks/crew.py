"""The workers of a run: each in a session of its own, under a time limit, one at a time or several at once.

A worker that runs alone is started when nobody else runs, and what the pause file lists stands still as long as it
lives. The others are started as far as `at_once` and the card's memory allow, boot and warm up beside each other, and
are timed in turns (turns.py). A limit counts the seconds in which a worker could run: not those it was stopped in, nor
those it waited for its turn. The run's deadline is one of the wall clock.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks import measure, turns

NOT_RUN = "not run: the run's time is up"
SETTLE_S = 0.5  # what the others had launched on the card is done by then
PATIENCE_S = 10.0  # for so long others that fit may begin before one that does not; then the card is emptied for it
HOLD_S = 30.0  # a turn is refused where somebody cannot be stopped in this time
NOT_ALONE = "not timed: somebody beside it could not be stopped"
POLL_S, POLL_TURN_S = 0.05, 0.2  # the parent looks less often while somebody is timed


@dataclass(eq=False)
class Job:
    """A worker to be. `words` are asked for when it is started: what they say may be known only then."""

    name: str
    words: Callable[[], list[str]]
    log: Path
    folder: Path  # where it stands
    environment: dict[str, str]
    limit: float
    alone: bool = True
    gib: float = 0.0
    after: Job | None = None
    problem: str | None = None  # "" once it has ended well
    passed: float | None = None  # since when it waits for room while others go first


@dataclass(eq=False)
class Worker:
    job: Job
    process: subprocess.Popen[bytes]
    log: IO[str]
    ran: float = 0.0  # seconds that its limit counts

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # a session of its own: its children go with it
        self.process.wait()
        self.log.close()


class Crew:
    def __init__(
        self,
        folder: Path,
        at_once: int = 1,
        room: float = float("inf"),
        pause_file: Path | None = None,
        deadline: float = float("inf"),
    ):
        self.turns = folder / "turns"
        self.turns.mkdir(parents=True, exist_ok=True)
        self.at_once, self.room, self.pause_file, self.deadline = at_once, room, pause_file, deadline
        self.running: list[Worker] = []
        self.quiet = turns.Quiet()
        self.holder: Worker | None = None
        self.asked: float | None = None  # since when somebody wants the others to stand still
        self.still: float | None = None  # since when they do
        self.granted = False

    def run(self, jobs: list[Job]) -> Iterator[Job]:
        """Each job as it ends, with its `problem`: "" or why it failed."""
        waiting, last = list(jobs), time.monotonic()
        try:
            while waiting or self.running:
                now = time.monotonic()
                self._count(now - last)
                last = now
                self._take_turns(now)
                if self.holder is None:
                    yield from self._start(waiting)
                for worker in list(self.running):
                    if (problem := self._ended(worker, now)) is not None:
                        self._leave(worker)
                        worker.job.problem = problem
                        yield worker.job
                time.sleep(POLL_TURN_S if self.still and (self.granted or self.holder is None) else POLL_S)
        finally:
            for worker in list(self.running):
                self._leave(worker)
            self.quiet.release()

    def _start(self, waiting: list[Job]) -> Iterator[Job]:
        for job in list(waiting):
            if time.monotonic() > self.deadline:
                job.problem = NOT_RUN
            elif job.after is not None and job.after.problem is None:
                continue
            elif job.after is not None and job.after.problem:
                job.problem = job.after.problem
            elif any(worker.job.alone for worker in self.running) or (job.alone and self.running):
                return
            elif job.alone:
                now = time.monotonic()
                if self._hold(turns.listed(self.pause_file), now):
                    self._begin(job)
                elif self.asked is not None and now - self.asked > HOLD_S:
                    job.problem = NOT_ALONE
                    self._let_go()
                else:
                    return  # asked again a moment later
            elif len(self.running) < self.at_once and self._fits(job):
                self._begin(job)
            elif len(self.running) < self.at_once and self._patience_ends(job):
                return
            else:
                continue
            waiting.remove(job)
            if job.problem is not None:
                yield job

    def _fits(self, job: Job) -> bool:
        return not self.running or job.gib + sum(worker.job.gib for worker in self.running) <= self.room

    def _patience_ends(self, job: Job) -> bool:
        """Small ones that come and go would keep a large one out for good."""
        now = time.monotonic()
        job.passed = now if job.passed is None else job.passed
        return now - job.passed > PATIENCE_S

    def _begin(self, job: Job) -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        environment = job.environment | {measure.STARTED: str(time.time())}
        if not job.alone:
            environment[turns.TURNS] = str(self.turns)
        log = job.log.open("w")
        process = subprocess.Popen(
            job.words(), stdout=log, stderr=subprocess.STDOUT, cwd=job.folder, env=environment, start_new_session=True
        )
        self.running.append(Worker(job, process, log))

    def _count(self, seconds: float) -> None:
        for worker in self.running:
            waits = turns.said(self.turns, worker.pid, "waits").exists()
            if worker is self.holder if self.holder else not waits:
                worker.ran += seconds

    def _take_turns(self, now: float) -> None:
        if any(worker.job.alone for worker in self.running):
            self._hold(turns.listed(self.pause_file), now)
            return
        if self.holder is None:
            # The lock is one worker's: there is never a second.
            self.holder = next((w for w in self.running if turns.said(self.turns, w.pid, "asks").exists()), None)
        holder = self.holder
        if holder is None:
            return
        if holder.process.poll() is not None or not turns.said(self.turns, holder.pid, "asks").exists():
            self._let_go()
            return
        others = {worker.pid for worker in self.running if worker is not holder} | turns.listed(self.pause_file)
        self._hold(others, now, but=holder.pid)
        if not self.granted and self.still is not None and now - self.still >= SETTLE_S:
            turns.said(self.turns, holder.pid, "granted").touch()
            self.granted = True

    def _hold(self, groups: set[int], now: float, but: int | None = None) -> bool:
        self.asked = self.asked or now
        if self.quiet.hold(groups, but) and self.still is None:
            self.still = now
        return self.still is not None

    def _let_go(self) -> None:
        self.holder, self.asked, self.still, self.granted = None, None, None, False
        self.quiet.release()

    def _ended(self, worker: Worker, now: float) -> str | None:
        """None while it is to go on."""
        job, code = worker.job, worker.process.poll()
        if code is not None:
            return "" if code == 0 else f"{last_line(job.log)} (exit {code})"
        if worker is self.holder and self.still is None and self.asked is not None and now - self.asked > HOLD_S:
            return NOT_ALONE
        if worker.ran > job.limit:
            return f"stopped after {job.limit:.0f} s; last line: {last_line(job.log)}"
        if now > self.deadline:
            return f"stopped: the run's time is up; last line: {last_line(job.log)}"
        return None

    def _leave(self, worker: Worker) -> None:
        worker.kill()  # of one that has ended: the children it has left, stopped ones above all
        self.running.remove(worker)
        for what in ("waits", "asks", "granted"):
            turns.said(self.turns, worker.pid, what).unlink(missing_ok=True)
        if worker is self.holder or worker.job.alone:
            self._let_go()


def last_line(log: Path) -> str:
    """The last line that is an error, with the one that it came of, or the last line."""
    lines = [text.strip() for text in log.read_text(errors="replace").splitlines() if text.strip()]
    chain: list[str] = []
    follows = False
    for text in lines:
        follows |= text.startswith(("During handling of the above", "The above exception was"))
        if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", text):
            chain, follows = [*(chain if follows else ()), text], False
    if len(chain) > 1:
        return f"{chain[0][:200]}; then {chain[-1][:90]}"
    return ((chain or lines or ["(it printed nothing)"])[-1])[:300]
