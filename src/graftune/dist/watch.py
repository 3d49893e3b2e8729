"""Watches a run of several ranks from a thread, and ends it when it cannot continue.

NCCL's own watchdog does not see collectives that are replayed from a CUDA graph, and a process that waits in one does
not react to signals. So every rank's thread writes a pulse to the store (what it is doing, which step it has begun);
rank 0 reads all of them, the others read rank 0's. A run is ended by:

    a fault     a rank reports what is wrong before it ends
    silence     a rank's pulse has stopped: it was killed, stopped or cut off
    a deadline  the oldest step that was begun does not finish, although every rank answers
    no store    the store is in rank 0's process, or in the launcher's, and either may be stopped or cut off: a call of
                it then never returns, which a second thread notices

In each case the rank whose fault is stored first prints one sentence, and every process ends with the same exit code,
by `os._exit`: the main thread may be waiting for a device that never answers.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from graftune.ranks import Ranks

BEAT = 0.5  # seconds between two pulses; more where there are hundreds of ranks
QUIET_STEPPING, QUIET = 15.0, 30.0  # seconds without a pulse; an import or a sort may hold Python's lock for long
QUIET_SUSPECT = 3.0  # after a broken connection
STOPPED = 2.0  # if a beat takes so many seconds longer, this process was stopped meanwhile
SLACK = 3.0  # a step may take so many times as long as the longest before it, whatever the deadline
LINGER = 3.0  # seconds for all ranks to read a fault before the first one ends, and the launcher ends the rest
BUG, MISTAKE = 1, 2  # exit codes
ADVICE = (
    "its process was killed or its machine cannot be reached: check the kernel log there for an out-of-memory kill, "
    "then go on with graftune train --resume (torchrun with --max-restarts restarts the run itself)"
)


class Watch:
    """Watches the other ranks. It starts before they meet; `deadline` may be set later. `say` prints the one
    sentence."""

    def __init__(self, ranks: Ranks, say: Callable[[str], None], attempt: int):
        self.ranks, self.say, self.attempt = ranks, say, attempt
        self.deadline = 0.0  # seconds; 0: none
        self.at_end: list[Callable[[], None]] = []  # called before the process ends
        self.doing = "starting"  # while it is not stepping
        self._begun, self._done, self._since, self._longest = 0, 0, 0.0, 0.0
        self._steps_done = 0
        self._pulses: dict[int, tuple[list[Any], float]] = {}  # by rank: the last one, and when it came
        self._ending, self._over = threading.Lock(), threading.Event()
        self._beat = max(BEAT, ranks.size / 500)
        self._store: Any = None
        self._looks = 0  # the last beat at which the store answered

    def start(self) -> None:
        """Start the threads, on a separate connection: the main thread may be blocked on the other one."""
        timeout = datetime.timedelta(seconds=30.0)
        store = dist.TCPStore(
            self.ranks.host, self.ranks.port, None, False, timeout=timeout, wait_for_workers=False, multi_tenant=False
        )
        self._store = dist.PrefixStore(f"graftune/{self.attempt}/watch", store)
        self._pulse(0)  # at once, so that a rank that dies before its first beat is noticed too
        for name, work in (("watch", self._watch), ("watch-store", self._watch_store)):
            threading.Thread(target=work, name=f"graftune-{name}", daemon=True).start()

    def stop(self) -> None:
        """End the watch at the end of the run: from here on, silence of this rank is not a fault."""
        if self._store is not None and not self._over.is_set():
            self._over.set()
            with suppress(RuntimeError):  # the store may have ended with rank 0
                self._store.set(f"over/{self.ranks.rank}", "1")

    # Called by the main thread

    def begin(self, step: int) -> None:
        """Record that a step is about to be sent."""
        if self._begun <= self._done:
            self._since = time.monotonic()
        self._begun, self.doing = step, ""

    def finished(self, step: int) -> None:
        now = time.monotonic()
        if self._steps_done:  # the first step compiles and captures
            self._longest = max(self._longest, now - self._since)
        self._done, self._since = step, now
        self._steps_done += 1

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """Mark work of this rank for which the others wait without a deadline."""
        before, self.doing = self.doing, doing
        try:
            yield
        finally:
            self.doing = before

    def fail(self, text: str, code: int = MISTAKE) -> None:
        """Store a fault for all ranks, and end; does not return. The first fault of a run counts, and its rank prints
        it."""
        if not self._ending.acquire(blocking=False):
            while True:  # the other thread of this process ends it
                time.sleep(1)
        mine = json.dumps([code, self.ranks.rank])
        try:
            found = self._store.compare_set("fault", "", mine).decode()
        except RuntimeError:  # the store is gone: print the fault, even if another rank prints one too
            found = mine
        if found == mine:
            self.say(text)
        self._count_readers(1)
        limit = time.monotonic() + LINGER
        while time.monotonic() < limit and self._count_readers() < self.ranks.size:
            time.sleep(0.05)
        self._exit(json.loads(found)[0])

    def lost(self, error: Exception) -> None:
        """End the run after a collective failed because a rank is gone; the pulses show which one. Does not return."""
        with suppress(RuntimeError):
            self._store.set("suspect", "1")
        time.sleep(max(QUIET_SUSPECT, 4 * self._beat) + 6 * self._beat)  # so that a missing pulse is noticed first
        self.fail(f"rank {self.ranks.rank}: the connection to the other ranks is broken ({first_line(error)})", BUG)

    # The threads

    def _watch_store(self) -> None:
        """Watch whether the store answers. Counts beats, so that time in which this process was stopped does not
        count."""
        looks, beats = -1, 0
        while not self._over.wait(BEAT):
            looks, beats = self._looks, beats + 1 if looks == self._looks else 0
            limit = min(QUIET_STEPPING, self.deadline or QUIET_STEPPING) + self._beat
            if self._ending.locked():  # all ranks are given time to read the fault
                limit += 2 * LINGER
            if beats * BEAT > limit:
                where = f"the rendezvous at {self.ranks.host}:{self.ranks.port}" if self.ranks.agent_store else "rank 0"
                self.say(f"{where} has not answered for {beats * BEAT:.0f} s, as rank {self.ranks.rank} sees it")
                self._exit(BUG)

    def _watch(self) -> None:
        count, last = 0, time.monotonic()
        while not self._over.wait(self._beat):
            asleep, last = time.monotonic() - last - self._beat, time.monotonic()
            if asleep > STOPPED:
                self._leave_out(asleep)
            count += 1
            try:
                self._look(count)
                self._looks = count
            except RuntimeError as error:
                if not self._over.is_set():
                    self.fail(f"rank {self.ranks.rank} has lost the rendezvous ({first_line(error)})", BUG)

    def _leave_out(self, seconds: float) -> None:
        """Ignore the silence of ranks while this process was stopped: a scheduler may have suspended the whole job."""
        self._pulses = {rank: (pulse, at + seconds) for rank, (pulse, at) in self._pulses.items()}
        self._since += seconds

    def _look(self, count: int) -> None:
        store, rank = self._store, self.ranks.rank
        self._pulse(count)
        if store.check(["fault"]):
            self.fail("another rank has ended the run", BUG)  # the stored fault counts, not this text
        suspect = store.check(["suspect"])
        for other in range(self.ranks.size) if self.ranks.leads else (0,):
            if other != rank:
                self._listen(other, suspect)
        self._look_at_steps()

    def _pulse(self, count: int) -> None:
        pulse = json.dumps([count, self._begun, self._done, self.doing])
        self._store.set(f"pulse/{self.ranks.rank}", pulse)

    def _listen(self, other: int, suspect: bool) -> None:
        """Check that another rank's pulse goes on."""
        store, now = self._store, time.monotonic()
        if not store.check([f"pulse/{other}"]):
            return
        pulse = json.loads(store.get(f"pulse/{other}"))
        before = self._pulses.get(other)
        if before is None or before[0] != pulse:
            self._pulses[other] = (pulse, now)
            return
        limit = QUIET if pulse[3] else min(QUIET_STEPPING, self.deadline or QUIET_STEPPING)
        limit = min(limit, max(QUIET_SUSPECT, 4 * self._beat)) if suspect else limit
        if now - before[1] > limit and not store.check([f"over/{other}"]):
            at = pulse[3] or f"at step {pulse[1]}"
            self.fail(f"rank {other} has not answered for {now - before[1]:.0f} s (it was {at}); {ADVICE}", BUG)

    def _look_at_steps(self) -> None:
        now = time.monotonic()
        if self._begun <= self._done or not self._steps_done or not self.deadline:
            return
        lead = self._pulses.get(0)
        if (lead is not None and lead[0][3]) or self.doing:  # a rank writes or answers: all wait for that
            self._since = now
            return
        allowed = max(self.deadline, SLACK * self._longest)
        if now - self._since > allowed:
            self.fail(self._hung(allowed), BUG)

    def _hung(self, seconds: float) -> str:
        """Find the step that hangs, and its ranks, from all pulses. If any rank has finished a step, the ranks hang in
        the next one."""
        store, ranks = self._store, range(self.ranks.size)
        known = {rank: json.loads(store.get(f"pulse/{rank}")) for rank in ranks if store.check([f"pulse/{rank}"])}
        step = 1 + max(self._done, *(done for _, _, done, _ in known.values()))
        behind = [rank for rank in ranks if rank not in known or known[rank][1] < step]
        text = f"step {step} has not finished within {seconds:.0f} s"
        if not behind:
            return f"{text}, and every rank has begun it: a device or the network hangs"
        if len(behind) == 1:
            return f"{text}: rank {behind[0]} has not begun it"
        return f"{text}: ranks {', '.join(map(str, behind[:8]))} have not begun it"

    # The end

    def _exit(self, code: int) -> None:
        for work in self.at_end:
            with suppress(OSError):
                work()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _count_readers(self, more: int = 0) -> int:
        """The number of ranks that have read the fault."""
        try:
            return int(self._store.add("fault_readers", more))
        except RuntimeError:
            return self.ranks.size


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
