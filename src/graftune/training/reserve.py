"""Reserves the memory of a run's device in the ledger that all runs of a machine share.

A run is planned within the memory that other runs leave, so `auto` picks settings that fit there. If none fit, the run
is refused with the names of the holders; with `wait_gpu` it is planned for the device without them, and queued. Another
run may reserve memory between a plan and its claim; then the run is planned again. Rejected: reserving all free memory
first and returning what the plan leaves, which would refuse every run that starts meanwhile.
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
from graftune.ledger import HOST, SHARE, VARIABLE, Availability, Claim, Ledger, Memory, Reservation, shared_ledger
from graftune.observe.console import Console
from graftune.observe.memory import available_bytes, free_bytes, human_bytes, own_bytes, total_bytes
from graftune.plan import Job, Plan, best, refusal, resolve_auto
from graftune.plan.job import CONTEXT_BYTES
from graftune.runtime import device_name, device_of, device_uuid
from graftune.session import Session
from graftune.settings.config import Config
from graftune.training.ranks import SingleProcess

RESOLVED = ("recompute", "tokens_per_micro_batch", "base_dtype", "base_on", "shard_base")  # the same on every rank
UNIFIED_SHARE = 0.6  # where CPU and GPU share one memory; SHARE on other devices
ATTEMPTS = 5  # plans, if other runs reserve the memory first
NOT_RESERVED = "the memory of this run is not reserved against other runs"
NAMED = 3  # holders that a message names

MakeJob = Callable[[int], Job]  # a job planned within this many bytes; 0: within the free memory


@dataclass(frozen=True)
class SharedDevice:
    """A device as the ledger names it: a GPU by its UUID, or the machine's memory."""

    device: torch.device
    name: str
    share: float  # of its memory that runs may reserve together

    @staticmethod
    def of(device: torch.device, config: Config) -> SharedDevice:
        if device.type != "cuda":
            return SharedDevice(device, HOST, config.run.memory_share or SHARE)
        unified = bool(torch.cuda.get_device_properties(device).is_integrated)
        share = config.run.memory_share or (UNIFIED_SHARE if unified else SHARE)
        return SharedDevice(device, device_uuid(device), share)

    @property
    def memory(self) -> Memory:
        if self.name == HOST:
            return Memory(total_bytes(), available_bytes())
        return Memory(torch.cuda.mem_get_info(self.device)[1], free_bytes(self.device))

    def measure(self) -> int:
        """Bytes that this process has allocated, without synchronising with the device."""
        return own_bytes() if self.name == HOST else torch.cuda.memory_reserved(self.device)

    def limit(self, left: int, limit: int = 0) -> int:
        """The memory limit of a job that may take `left` bytes: at least 1, and on a GPU including the used bytes."""
        memory = self.memory
        found = max(1, left if self.name == HOST else memory.total - memory.free + left)
        return min(found, limit) if limit else found

    def __str__(self) -> str:
        return "this machine's memory" if self.name == HOST else device_name(self.device)


class Reserver:
    """The claims of one process, released when `held` is closed. Every rank has one."""

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
        self.device, self.on_gpu = SharedDevice.of(device, config), device.type == "cuda"
        self.claimed = False

    def planned(self, config: Config, make: Callable[[Config, int], Job]) -> tuple[Config, Job, Plan]:
        """Plans within the memory that other runs leave, and reserves it. `make` returns the job of these settings
        within so many bytes. Rank 0 resolves `auto`; the other ranks check that its settings fit on their devices."""
        limit, host_free = self.ranks.memory(self.device.device), None
        if self.on_gpu:
            host_free = min(self.ranks.gather(available_bytes() // self.ranks.local_size))

        def within(memory: int) -> Job:
            job = make(config, memory)
            if job.host_free is not None:
                job.host_free = host_free
            return job

        resolved: dict[str, Any] = {}
        if self.ranks.leads:
            for _ in range(ATTEMPTS):
                job, plan, waits = self._fitting(within, limit)
                if waits or self._reserve(plan.needed, 0.0) is None:
                    break
            self._reserve_or_raise(plan.needed)
            resolved = {name: plan.settings[name] for name in RESOLVED}
        resolved = self.ranks.from_lead(lambda: resolved)
        if not self.ranks.leads:
            config = config.replace(**resolved)
            job, plan, _ = self._fitting(within, limit)
        self.ranks.in_turn(lambda: self._reserve_or_raise(plan.needed))
        return config, job, plan

    def _fitting(self, make: MakeJob, limit: int) -> tuple[Job, Plan, bool]:
        """A plan within the memory that is left now, and False; or one for the device without the other runs, and
        True: the run has to wait for it."""
        if self.ledger is None:
            job = make(limit)
            return job, resolve_auto(job), False
        device = self.device
        found = self.ledger.available(device.name, device.memory, share=device.share, group=self.group)
        job = make(limit if found.alone else device.limit(found.left, limit))
        plan = best(job)
        if plan.fits:
            if not found.alone:
                self.console.note(_planned_within(device, found))
            return job, plan, False
        if found.alone and not self.seconds:
            raise refusal(job, plan)
        later = make(device.limit(self._without_holders(found), limit))
        whole = resolve_auto(later)
        if not self.seconds:
            raise self._refused(plan.needed, found)
        return later, whole, True

    def _reserve_or_raise(self, size: int) -> None:
        """Wait up to `wait_gpu` seconds for memory that is not reserved yet."""
        if (refused := self._reserve(size, self.seconds)) is not None:
            raise self._refused(size, refused)

    def _reserve(self, size: int, seconds: float) -> Availability | None:
        """Reserve `size` bytes, waiting up to `seconds`. Returns None if that worked or there is no ledger; otherwise
        what was available at the end."""
        device = self.device
        if self.ledger is None or self.claimed:
            return None
        claim = self.ledger.claim(device.name, size, task=self.task, share=device.share, group=self.group)
        last = ""

        def waiting(found: Availability) -> None:
            nonlocal last
            text = _users(found)
            if text != last:
                self.console.note(f"waiting up to {seconds:g} s for {human_bytes(size)} of {device}: {text}")
                last = text

        with self.console.working("waiting for memory") if seconds else nullcontext():
            found = claim.wait(lambda: device.memory, seconds, waiting)
        if not claim.granted:
            return found
        self.claimed = True
        self.held.callback(_release, claim)
        claim.keep(device.measure)
        return None

    def _without_holders(self, found: Availability) -> int:
        """Bytes that will be free once the holders have ended; on a GPU also programs without a reservation."""
        memory = self.device.memory
        freed = memory.free + sum(one.measured for one in found.holders)
        return max(freed, memory.total - CONTEXT_BYTES) if self.on_gpu else freed

    def _refused(self, size: int, found: Availability) -> GraftuneError:
        waited = f" after {self.seconds:g} s" if self.seconds else ""
        longer = "longer " if self.seconds else ""
        return GraftuneError(
            f"training needs {human_bytes(size)} of {self.device} and {human_bytes(found.left)} are left{waited}: "
            f"{_users(found)}",
            fix=f"wait {longer}by setting wait_gpu to seconds, or let runs reserve more together with memory_share",
        )


def left_by_others(config: Config, console: Console) -> int:
    """The memory limit of a plan that reserves nothing; 0 if no run has reserved memory of the device."""
    device, ledger = device_of(config.base.device), shared_ledger()
    if ledger is None or device.type not in ("cuda", "cpu"):
        return 0
    shared = SharedDevice.of(device, config)
    found = ledger.available(shared.name, shared.memory, share=shared.share)
    if found.alone:
        return 0
    console.note(_planned_within(shared, found))
    return shared.limit(found.left)


def register(session: Session, console: Console, task: str) -> None:
    """Records the memory of a session that does not train, until it is closed. Nothing is refused."""
    device = session.runtime.device
    ledger = _ledger(console, required=False) if device.type in ("cuda", "cpu") else None
    if ledger is None:
        return
    shared = SharedDevice.of(device, session.config)
    claim = ledger.claim(shared.name, shared.measure(), task=task)
    try:
        claim.register()
    except GraftuneError as error:
        console.warn(f"{NOT_RESERVED}: {error}")
        return
    claim.keep(shared.measure)
    weakref.finalize(session, _release, claim)


def _release(claim: Claim) -> None:
    with suppress(GraftuneError):  # the reservation ends with the process
        claim.release()


def _ledger(console: Console, *, required: bool) -> Ledger | None:
    """The machine's ledger; None, with a warning, where it cannot be written: then only the free memory counts."""
    ledger = shared_ledger(console.warn)
    try:
        if ledger is not None:
            ledger.check()
        elif required:
            raise GraftuneError(
                f"wait_gpu is set and {VARIABLE} is off", where="environment", fix="unset one of the two"
            )
        return ledger
    except GraftuneError as error:
        if required:
            raise
        console.warn(f"{NOT_RESERVED}: {error}")
        return None


def _planned_within(device: SharedDevice, found: Availability) -> str:
    return f"planned within {human_bytes(found.left)} that are left of {device}: {_users(found)}"


def _users(found: Availability) -> str:
    """The runs that hold the memory or wait for it."""
    parts = []
    if found.ahead:
        count = len(found.ahead)
        parts.append(f"{count} {'run is' if count == 1 else 'runs are'} ahead in the queue")
    if found.holders:
        more = len(found.holders) - NAMED
        others = [f"{more} more"] if more > 0 else []
        parts.append("reserved by " + ", ".join([*map(described, found.holders[:NAMED]), *others]))
    return "; ".join(parts) or "programs that reserve nothing use it"


def described(one: Reservation) -> str:
    since = time.strftime("%H:%M", time.localtime(one.started))
    return f"process {one.pid} of {one.user} ({one.task}, {human_bytes(one.booked)} since {since})"
