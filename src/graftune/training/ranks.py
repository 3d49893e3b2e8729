"""The ranks of a run, as its preparation and its loop use them. `SingleProcess` itself is a run of one process.

Every rank does the same work in the same order, from the same settings and data, and holds the same weights. Only rank
0 prints and writes files: the others know the name of the run folder, and get its content from rank 0. Nothing is
written within a collective: rank 0 writes, and the others wait in their next step for it.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from graftune.dist.watch import BUG, MISTAKE, Watch
from graftune.dist.world import World, connect, is_broken, join
from graftune.errors import GraftuneError
from graftune.observe.console import Console
from graftune.observe.memory import free_bytes
from graftune.ranks import Ranks
from graftune.runtime import device_of
from graftune.session import SessionParts
from graftune.step.pipeline import Figures
from graftune.weights.checkpoint import Progress

Made = TypeVar("Made")
POLL_SECONDS = 0.2


class SingleProcess:
    """The ranks of a run: here one process, which is rank 0; in `Distributed` several."""

    world: World | None = None
    leads = True  # whether this is rank 0
    size = 0  # ranks that a launcher has started
    local_size = 1  # processes of this run on this machine

    def device(self, asked: str) -> torch.device:
        return device_of(asked)

    def attach(self, device: torch.device) -> str:
        """Connect the ranks for tensors of this device. Returns a note for the user."""
        return ""

    def in_turn(self, work: Callable[[], Made]) -> Made:
        """Do work that fills a cache, so that ranks which share the cache do it one after the other."""
        return work()

    def from_lead(self, work: Callable[[], Made]) -> Made:
        """Rank 0's result, which must be a value that JSON can hold."""
        return work()

    def gather(self, value: Made) -> list[Made]:
        return [value]

    def same(self, facts: Mapping[str, Any], fix: str) -> None:
        """Raise an error if a rank has other facts than rank 0."""
        for rank, theirs in enumerate(everyone := self.gather(dict(facts))):
            for name in everyone[0] | theirs:
                value = everyone[0].get(name)
                if theirs.get(name) != value:
                    shown = "other" if len(str(value)) > 60 else repr(theirs.get(name))
                    than = "than rank 0" if len(str(value)) > 60 else f"where rank 0 has {value!r}"
                    raise GraftuneError(f"rank {rank} has {shown} {name} {than}", fix=fix)

    def memory(self, device: torch.device) -> int:
        """Bytes that a rank may plan with; 0: the free memory."""
        return 0

    def set_deadline(self, seconds: float) -> None:
        """End the run if a step takes longer."""

    def begin(self, step: int) -> None:
        """A step is about to be sent."""

    def finished(self, figures: Figures) -> None:
        """A step has finished."""

    def spread(self, parts: SessionParts, progress: Progress) -> Progress:
        """Copy rank 0's state, which it may have read from a checkpoint, to every rank."""
        return progress

    def busy(self, doing: str) -> AbstractContextManager[None]:
        """Around work of rank 0 for which the others wait."""
        return nullcontext()

    def at_end(self, work: Callable[[], None]) -> None:
        """Call `work` if another rank or a fault ends the run."""


class Distributed(SingleProcess):
    """One of the processes that a launcher has started for a run."""

    world: World

    def __init__(self, world: World, watch: Watch):
        self.world, self.watch = world, watch
        self.leads, self.size, self.local_size = world.leads, world.size, world.ranks.local_size

    def device(self, asked: str) -> torch.device:
        """A GPU of its own for every rank of a machine, unless one is named."""
        device = device_of(asked)
        if device.type != "cuda" or device.index is not None:
            return device
        local, count = self.world.local_rank, torch.cuda.device_count()
        if local >= count:
            raise GraftuneError(
                f"rank {self.world.rank} is number {local} on its machine, which has {count} CUDA devices",
                fix="start as many processes as there are GPUs, or set device to cuda:0 to let them share one",
            )
        return torch.device("cuda", local)

    def attach(self, device: torch.device) -> str:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.world.attach(device)
        count = "1 rank" if self.size == 1 else f"{self.size} ranks"
        how = f"{count}, gradients added up over {self.world.backend}"
        if device.type == "cuda" and not self.world.captured:
            how += " between the CUDA graphs, for which the host waits: ranks share a GPU, or NCCL is missing"
        return how

    def in_turn(self, work: Callable[[], Made]) -> Made:
        return self.world.in_turn(work)

    def gather(self, value: Made) -> list[Made]:
        return self.world.gather(value)

    def from_lead(self, work: Callable[[], Made]) -> Made:
        made: Made = self.world.from_lead(work() if self.leads else None)
        return made

    def memory(self, device: torch.device) -> int:
        """On a CPU, an equal share of the free memory; on a shared GPU, the used bytes and a share of the free ones."""
        if device.type == "cpu":
            return min(self.gather(free_bytes(device) // self.local_size))
        sharing = self.world.sharing
        if device.type != "cuda" or sharing == 1:
            return 0
        free, total = free_bytes(device), torch.cuda.mem_get_info(device)[1]
        return total - free + free // sharing

    def set_deadline(self, seconds: float) -> None:
        self.watch.deadline = seconds

    def begin(self, step: int) -> None:
        self.watch.begin(step)

    def busy(self, doing: str) -> AbstractContextManager[None]:
        return self.watch.busy(doing)

    def finished(self, figures: Figures) -> None:
        step = figures.tag["step"]
        self.watch.finished(step)
        if figures.signals.differ:
            self.watch.fail(
                f"the ranks' weights have drifted apart by step {step}, as rank {self.world.rank} sees it: a device or "
                "a library computes other numbers on one of them",
                BUG,
            )

    def spread(self, parts: SessionParts, progress: Progress) -> Progress:
        arena, scaler = parts.arena, parts.step.scaler
        for tensor in (arena.weights, arena.m, arena.v, *([] if scaler is None else [scaler.state])):
            self.world.spread(tensor)
        arena.publish()
        found = Progress(**self.world.from_lead(asdict(progress)))
        parts.step.count.fill_(found.updates)
        return found

    def until_done(self) -> None:
        """Wait until rank 0 has written everything."""
        store = self.world.store
        if self.leads:
            store.set("done", "1")
        while not store.check(["done"]):
            time.sleep(POLL_SECONDS)
        self.world.wait()

    def at_end(self, work: Callable[[], None]) -> None:
        self.watch.at_end.append(work)

    @property
    def restarted(self) -> bool:
        """Whether a launcher has started these ranks before. Each node counts only its own restarts."""
        return self.world.attempt > 1 or max(self.gather(self.world.ranks.restarts)) > 0

    def stopped(self, number: int) -> None:
        """End all ranks after a signal before the first step, which the others may not have received. Does not
        return."""
        name = signal.Signals(number).name
        self.watch.fail(f"rank {self.world.rank} was stopped by {name} before the first step", 128 + number)


@contextmanager
def joined(ranks: Ranks, console: Console) -> Iterator[Distributed]:
    """Join the other processes of the run. A failure of one of them ends all; only signals reach the caller."""
    store, attempt = connect(ranks)  # an error before this one is only printed: the other ranks cannot be reached
    watch = Watch(ranks, console.fail, attempt)
    watch.start()
    name = "" if ranks.leads else f"rank {ranks.rank}: "
    try:
        world = join(ranks, store, attempt)
        yield Distributed(world, watch)
        watch.stop()
        world.leave()
    except (GraftuneError, OSError) as error:
        text = str(error)
        watch.fail(text if text.startswith("rank ") else name + text, MISTAKE)
    except torch.OutOfMemoryError as error:
        reason = str(error).strip().partition(".")[0]
        watch.fail(f"{name}out of memory ({reason}); make tokens_per_micro_batch smaller or set recompute", MISTAKE)
    except Exception as error:
        if is_broken(error):
            watch.lost(error)
        traceback.print_exc()
        watch.fail(f"{name}{type(error).__name__}: {error}", BUG)
