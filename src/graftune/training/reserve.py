"""A run's claim on the memory of its device, in the ledger that all runs of a machine share.

What the others leave is what a run is planned within: `auto` finds settings that fit there. If none does, the run is
refused with the names of those who hold the memory, or (`wait_gpu`) planned for the device as it will be without them,
and queued. Between a plan and its claim somebody may have been faster; then it is planned anew. Rejected: to claim all
that is free first and to give back what the plan leaves, which would refuse everybody who starts meanwhile.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.ledger import HOST, SHARE, VARIABLE, Claim, Entry, Ledger, Memory, Room, shared_ledger
from graftune.observe.console import Console
from graftune.observe.memory import available_bytes, free_bytes, human_bytes, own_bytes, total_bytes
from graftune.plan import Job, Plan, best, refusal, resolve_auto
from graftune.plan.job import CONTEXT_BYTES
from graftune.runtime import device_name, device_of, device_uuid
from graftune.session import Session
from graftune.settings.config import Config
from graftune.training.ranks import SingleProcess

RESOLVED = ("recompute", "tokens_per_micro_batch", "base_dtype", "base_on", "shard_base")  # the same on every rank
UNIFIED_SHARE = 0.6  # where CPU and GPU share one memory; of other devices it is SHARE
TRIES = 5  # plans that others may be faster than
PINNED = 1 << 28  # bytes of host memory beside a GPU that are claimed, too
SETTLING = 0.2  # seconds between two looks at a ledger whose entries were lost
NOT_RESERVED = "the memory of this run is not reserved against other runs"
NAMED = 3  # holders that a sentence names

Make = Callable[[int], Job]  # a job that is planned within so many bytes; 0: within what is free


@dataclass(frozen=True)
class Shared:
    """A device as the ledger knows it: a GPU by its UUID, or the machine's own memory."""

    device: torch.device
    name: str
    share: float  # of it that runs may reserve together

    @staticmethod
    def of(device: torch.device, config: Config) -> Shared:
        if device.type != "cuda":
            return Shared(device, HOST, config.run.memory_share or SHARE)
        unified = bool(torch.cuda.get_device_properties(device).is_integrated)
        return Shared(device, device_uuid(device), config.run.memory_share or (UNIFIED_SHARE if unified else SHARE))

    @property
    def memory(self) -> Memory:
        if self.name == HOST:
            return Memory(total_bytes(), available_bytes())
        return Memory(torch.cuda.mem_get_info(self.device)[1], free_bytes(self.device))

    def measure(self) -> int:
        """What this process has taken of it. Asks the device nothing."""
        return own_bytes() if self.name == HOST else torch.cuda.memory_reserved(self.device)

    def within(self, left: int, limit: int = 0) -> int:
        """`left` bytes as the limit that a job takes: never 0, and on a GPU with what is taken of it."""
        memory = self.memory
        found = max(1, left if self.name == HOST else memory.total - memory.free + left)
        return min(found, limit) if limit else found

    def __str__(self) -> str:
        return "this machine's memory" if self.name == HOST else device_name(self.device)


class Reserver:
    """One process's claims, all of them given back when `held` is closed. Every rank makes one."""

    def __init__(
        self,
        config: Config,
        device: torch.device,
        console: Console,
        held: ExitStack,
        *,
        task: str,
        ranks: SingleProcess,
    ):
        self.console, self.held, self.ranks = console, held, ranks
        self.seconds, self.task, self.group = config.run.wait_gpu, task, ranks.from_lead(lambda: os.urandom(16).hex())
        self.ledger = _ledger(console, required=self.seconds > 0)
        self.device, self.host = Shared.of(device, config), Shared.of(torch.device("cpu"), config)
        self.on_gpu = device.type == "cuda"
        self._claimed: set[Shared] = set()

    def planned(self, config: Config, make: Callable[[Config, int], Job]) -> tuple[Config, Job, Plan]:
        """Planned within what other runs leave, and claimed. `make` gives the job of these settings within so many
        bytes. What rank 0 resolves is what the others ask for: whether it fits with them is theirs to say."""
        limit, host_free = self.ranks.memory(self.device.device), None
        if self.on_gpu:
            host_free = self._host_left(self.ranks.host_share(available_bytes()))

        def within(memory: int) -> Job:
            job = make(config, memory)
            if job.host_free is not None:
                job.host_free = host_free
            return job

        resolved: dict[str, Any] = {}
        if self.ranks.leads:
            job, plan = self._planned(within, limit)
            resolved = {name: plan.settings[name] for name in RESOLVED}
        resolved = self.ranks.from_lead(lambda: resolved)
        if not self.ranks.leads:
            config = config.replace(**resolved)
            job, plan, _ = self._fitting(within, limit)
        self.ranks.one_by_one(lambda: self._claim(plan))
        return config, job, plan

    def _planned(self, make: Make, limit: int) -> tuple[Job, Plan]:
        for _ in range(TRIES):
            job, plan, waits = self._fitting(make, limit)
            if waits or self.ledger is None or self._take(self.ledger, plan):
                break
        self._claim(plan)
        return job, plan

    def _fitting(self, make: Make, limit: int) -> tuple[Job, Plan, bool]:
        """A plan within what is left now; or else, and True, within what there will be once the others have gone."""
        if self.ledger is None:
            job = make(limit)
            return job, resolve_auto(job), False
        room = self._room(self.device)
        job = make(limit if room.alone else self.device.within(room.left, limit))
        plan = best(job)
        if plan.fits:
            if not room.alone:
                self.console.note(_within(self.device, room))
            return job, plan, False
        if room.alone and not self.seconds:
            raise refusal(job, plan)
        later = make(self.device.within(self._once_gone(room), limit))
        whole = resolve_auto(later)
        if not self.seconds:
            raise self._refused(self.device, plan.needed, room)
        return later, whole, True

    def _claim(self, plan: Plan) -> None:
        """What was not granted yet: within `wait_gpu`, or refused. Of the host memory beside a GPU always after the
        GPU's own, so that no two runs wait for each other."""
        if self.ledger is None:
            return
        sizes = {self.device: plan.needed}
        if self.on_gpu and plan.bytes.host > PINNED:
            sizes[self.host] = plan.bytes.host
        for shared, size in sizes.items():
            if shared not in self._claimed:
                self._wait(self.ledger, shared, size)

    def _host_left(self, free: int) -> int:
        """Of the host's free memory, for a run on a GPU."""
        if self.ledger is None:
            return free
        room = self._room(self.host)
        return free if room.alone else min(free, room.left)

    def _take(self, ledger: Ledger, plan: Plan) -> bool:
        """At once or not at all."""
        claim = self._new(ledger, self.device, plan.needed)
        claim.take(self.device.memory)
        return self._granted(self.device, claim)

    def _wait(self, ledger: Ledger, shared: Shared, size: int) -> None:
        claim, said = self._new(ledger, shared, size), [""]

        def told(room: Room) -> None:
            text = _said(room)
            if text != said[0]:
                self.console.note(f"waiting up to {self.seconds:g} s for {human_bytes(size)} of {shared}: {text}")
                said[0] = text

        with self.console.working("waiting for memory") if self.seconds else nullcontext():
            room = claim.wait(lambda: shared.memory, self.seconds, told)
        if not self._granted(shared, claim):
            raise self._refused(shared, size, room)

    def _new(self, ledger: Ledger, shared: Shared, size: int) -> Claim:
        return ledger.claim(shared.name, size, task=self.task, share=shared.share, group=self.group)

    def _granted(self, shared: Shared, claim: Claim) -> bool:
        if claim.granted:
            self._claimed.add(shared)
            self.held.callback(self._release, claim)
            claim.keep(shared.measure)
        return claim.granted

    def _release(self, claim: Claim) -> None:
        try:
            claim.release()
        except GraftuneError as error:  # whoever looks next sees that this process has gone
            self.console.warn(f"the memory of this run stays reserved until it ends: {error}")

    def _room(self, shared: Shared) -> Room:
        assert self.ledger is not None
        while True:
            room = self.ledger.room(shared.name, shared.memory, share=shared.share, group=self.group)
            if not room.settling:
                return room
            time.sleep(SETTLING)

    def _once_gone(self, room: Room) -> int:
        """Bytes that will be free without the holders; of a GPU also without programs that are not in the ledger."""
        memory = self.device.memory
        back = memory.free + sum(entry.measured for entry in room.holders)
        return max(back, memory.total - CONTEXT_BYTES) if self.on_gpu else back

    def _refused(self, shared: Shared, size: int, room: Room) -> GraftuneError:
        waited = f" after {self.seconds:g} s" if self.seconds else ""
        longer = "longer " if self.seconds else ""
        return GraftuneError(
            f"training needs {human_bytes(size)} of {shared} and {human_bytes(room.left)} are left{waited}: "
            f"{_said(room)}",
            fix=f"wait {longer}by setting wait_gpu to seconds, or let runs reserve more together with memory_share",
        )


def left_by_others(config: Config, console: Console) -> int:
    """For a plan that reserves nothing: the limit that its job takes. 0: nobody has reserved any of the device."""
    device, ledger = device_of(config.base.device), shared_ledger()
    if ledger is None or device.type not in ("cuda", "cpu"):
        return 0
    shared = Shared.of(device, config)
    room = ledger.look(shared.name, shared.memory, share=shared.share)
    if room.alone:
        return 0
    console.note(_within(shared, room))
    return shared.within(room.left)


def enter(session: Session, console: Console, task: str) -> None:
    """What a session that trains nothing has taken, for others to see, until it is gone. Nothing is refused."""
    device = session.runtime.device
    ledger = _ledger(console, required=False) if device.type in ("cuda", "cpu") else None
    if ledger is None:
        return
    shared = Shared.of(device, session.config)
    claim = ledger.claim(shared.name, shared.measure(), task=task)
    try:
        claim.enter()
    except GraftuneError as error:
        console.warn(f"{NOT_RESERVED}: {error}")
        return
    claim.keep(shared.measure)
    weakref.finalize(session, _given_back, claim)


def _given_back(claim: Claim) -> None:
    with suppress(GraftuneError):  # the process ends, and with it what it has reserved
        claim.release()


def _ledger(console: Console, *, required: bool) -> Ledger | None:
    """None, and that is said, where there is none that can be written: then it is the free memory that counts."""
    ledger = shared_ledger(console.warn)
    if ledger is None:
        if required:
            raise GraftuneError(
                f"wait_gpu is set and {VARIABLE} is off", where="environment", fix="unset one of the two"
            )
        return None
    try:
        ledger.check()
    except GraftuneError as error:
        if required:
            raise
        console.warn(f"{NOT_RESERVED}: {error}")
        return None
    return ledger


def _within(shared: Shared, room: Room) -> str:
    return f"planned within {human_bytes(room.left)} that are left of {shared}: {_said(room)}"


def _said(room: Room) -> str:
    """Who has it, and who waits."""
    parts = []
    if room.ahead:
        count = len(room.ahead)
        parts.append(f"{count} {'run is' if count == 1 else 'runs are'} ahead in the queue")
    if room.holders:
        more = len(room.holders) - NAMED
        others = [f"{more} more"] if more > 0 else []
        parts.append("reserved by " + ", ".join([*map(described, room.holders[:NAMED]), *others]))
    return "; ".join(parts) or "programs that reserve nothing use it"


def described(entry: Entry) -> str:
    since = time.strftime("%H:%M", time.localtime(entry.started))
    return f"process {entry.pid} of {entry.user} ({entry.task}, {human_bytes(entry.booked)} since {since})"
