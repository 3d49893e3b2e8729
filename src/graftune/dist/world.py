"""The processes of one run, and how they communicate.

There are two groups. `group` carries the tensors of a step, over NCCL where every rank has a CUDA device of its own and
over gloo elsewhere; `host` carries values that the ranks must agree on, over gloo, as JSON. Pickled objects, which
torch would send, are never read here. Before the groups are made, the ranks meet in a key-value store: it can tell
which rank is missing, came twice or runs another version, which no collective could do.

Importing torch has imported torch.distributed already; a run of one process makes no group and opens no socket.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from graftune import __version__
from graftune.dist.watch import first_line
from graftune.errors import GraftuneError
from graftune.ranks import Ranks, Share

JOIN_SECONDS = 300.0  # within which every rank has to join
# The watch notices a rank that is gone; a collective's own time limit would end a run while rank 0 writes for long.
HOST_SECONDS = DEVICE_SECONDS = 86400.0
POLL_SECONDS = 0.05

Made = TypeVar("Made")


class World:
    """One process among those of a run. `join` makes one; `attach` adds the group for a device's tensors."""

    def __init__(self, ranks: Ranks, store: dist.Store, host: dist.ProcessGroup, attempt: int):
        self.ranks, self.store, self.host = ranks, store, host
        self.attempt = attempt  # the number of this start of the ranks, above 1 if a launcher has restarted them
        self.rank, self.size, self.local_rank = ranks.rank, ranks.size, ranks.local_rank
        self.leads = ranks.leads  # it prints and writes the files
        self.share = Share(ranks.rank, ranks.size)
        self.backend, self.sharing = "", 1  # ranks that share this one's device
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group for the tensors of a step."""
        assert self._group is not None, "attach a device first"
        return self._group

    @property
    def captured(self) -> bool:
        """Whether collectives over `group` can be part of a CUDA graph."""
        return self.backend == "nccl"

    def attach(self, device: torch.device) -> None:
        """Make the group for tensors on `device`. All ranks call it."""
        if self._group is not None:
            return
        name = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)
        places = self.gather([platform.node(), name])
        kinds = self.gather(device.type)
        for rank, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise GraftuneError(
                    f"rank {rank} computes on {kind} and rank 0 on {kinds[0]}",
                    fix="give every rank a GPU of its own, or set device to cpu",
                )
        shared = any(places.count(place) > 1 for place in places)  # NCCL refuses two ranks of one GPU
        self.sharing = places.count(places[self.rank])
        self.backend = "nccl" if device.type == "cuda" and not shared and dist.is_nccl_available() else "gloo"
        if self.backend == "nccl":
            # Buffers of a graph that NCCL registers may not lie in segments that grow.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        timeout = datetime.timedelta(seconds=DEVICE_SECONDS)
        self._group = dist.new_group(backend=self.backend, timeout=timeout, group_desc="graftune step")
        # The communicator is made by its first collective, which no capture may contain.
        first = torch.zeros(1, device=device)
        dist.all_reduce(first, group=self._group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks. A value is what JSON can hold."""
        written = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(written)]), group=self.host)
        counts = [int(size) for size in sizes]
        padded = torch.zeros(max(counts), dtype=torch.uint8)
        padded[: len(written)] = written
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded, group=self.host)
        return [json.loads(bytes(one[:count].numpy())) for one, count in zip(found, counts, strict=True)]

    def from_lead(self, value: Any = None) -> Any:
        """Rank 0's value; the others' values are ignored."""
        written = json.dumps(value).encode() if self.leads else b""
        size = torch.tensor([len(written)])
        dist.broadcast(size, 0, group=self.host)
        held = torch.frombuffer(bytearray(written), dtype=torch.uint8) if self.leads else torch.empty(int(size)).byte()
        dist.broadcast(held, 0, group=self.host)
        return json.loads(bytes(held.numpy()))

    def add_up(self, sums: torch.Tensor) -> None:
        """Sum a flat buffer over all ranks, in place: every rank ends with the same bits.

        All trainable weights are in one buffer, so one all-reduce is enough, without the buckets and hooks that a list
        of parameters needs. Over NCCL it is a node of the captured update. Gloo works on the host: there it runs
        between the graphs, and the host waits for it."""
        dist.all_reduce(sums, group=self.group)

    def spread(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's content of the tensor to every rank."""
        dist.broadcast(tensor, 0, group=self.group)

    def wait(self) -> None:
        dist.barrier(group=self.host)

    def in_turn(self, work: Callable[[], Made]) -> Made:
        """Do `work` on rank 0 first, then on the first rank of every other machine, then on the rest: later ranks find
        its result in a cache, and no two ranks of a machine compute it at once."""
        mine = 0 if self.leads else 1 if not self.local_rank else 2
        made: list[Made] = []
        for turn in range(1 + max(self.gather(mine))):
            if turn == mine:
                made.append(work())
            self.wait()
        return made[0]

    def leave(self) -> None:
        """End the groups. This is no collective: a late rank may still be writing."""
        dist.destroy_process_group()
        self._group = None


def join(ranks: Ranks, store: dist.Store, attempt: int) -> World:
    """Meet the other ranks in the store of `connect`, check that all of them fit together, and make the host's
    group."""
    _meet(ranks, store, attempt)
    timeout = datetime.timedelta(seconds=HOST_SECONDS)
    try:
        dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.size, timeout=timeout)
    except RuntimeError as error:
        raise GraftuneError(
            f"the ranks cannot connect to each other over gloo ({error})",
            where=f"rank {ranks.rank}",
            fix="name the network interface in GLOO_SOCKET_IFNAME, and let its ports through",
        ) from None
    return World(ranks, store, dist.group.WORLD, attempt)


def connect(ranks: Ranks) -> tuple[dist.Store, int]:
    """The launcher's store, with the number of this start as a prefix, so that a restart finds no old keys."""
    try:
        store = dist.TCPStore(
            ranks.host,
            ranks.port,
            None,
            ranks.leads and not ranks.agent_store,
            timeout=datetime.timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise GraftuneError(
            f"the rendezvous at {ranks.host}:{ranks.port} cannot be reached ({first_line(error)})",
            where=f"rank {ranks.rank}",
            fix="check the address and port that the launcher was given, and that rank 0 is up",
        ) from None
    attempt = _attempt(ranks, store)
    return dist.PrefixStore(f"graftune/{attempt}", store), attempt


def _attempt(ranks: Ranks, store: dist.Store) -> int:
    """The number of this start of the ranks. Rank 0 counts, and answers every rank that asks (`_admit`): torchrun's
    agents keep the store over restarts, and each counts only the restarts that its own processes caused."""
    if ranks.leads:
        return int(store.add("graftune/attempts", 1))
    answer = f"graftune/answer/{ranks.rank}/{store.add(f'graftune/knocks/{ranks.rank}', 1)}"
    limit = time.monotonic() + JOIN_SECONDS
    while not store.check([answer]):
        if time.monotonic() > limit:
            raise GraftuneError(
                f"rank 0 is not here after {JOIN_SECONDS:g} s, of {ranks.size} ranks in all",
                where=f"rank {ranks.rank}",
                fix="start every rank with the same rendezvous and the same number of processes",
            )
        time.sleep(POLL_SECONDS)
    return int(store.get(answer))


def _admit(store: dist.Store, rank: int, attempt: int, answered: dict[int, int]) -> None:
    """Answer every request of this rank that was not answered yet. Some may be from processes that are gone."""
    knocks = int(store.add(f"graftune/knocks/{rank}", 0))
    for number in range(answered.get(rank, 0) + 1, knocks + 1):
        store.set(f"graftune/answer/{rank}/{number}", str(attempt))
    answered[rank] = knocks


def _meet(ranks: Ranks, store: dist.Store, attempt: int) -> None:
    """Wait until every rank is here, once, with the same size and versions. All ranks refuse one that differs."""
    if store.add(f"seats/{ranks.rank}", 1) > 1:
        raise GraftuneError(
            f"two processes say that they are rank {ranks.rank}", fix="give every process a rank of its own"
        )
    store.set(f"here/{ranks.rank}", json.dumps(_facts(ranks)))
    missing, limit = list(range(ranks.size)), time.monotonic() + JOIN_SECONDS
    whole, answered = store.underlying_store if ranks.leads else store, dict[int, int]()
    while missing := [rank for rank in missing if not store.check([f"here/{rank}"])]:
        for rank in missing if ranks.leads else ():
            _admit(whole, rank, attempt, answered)
        if time.monotonic() > limit:
            who = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {', '.join(map(str, missing[:8]))} are"
            raise GraftuneError(
                f"{who} not here after {JOIN_SECONDS:g} s, of {ranks.size} in all",
                where=f"{ranks.host}:{ranks.port}",
                fix="start every rank with the same rendezvous and the same number of processes",
            )
        time.sleep(POLL_SECONDS)
    lead = json.loads(store.get("here/0"))
    for rank in range(1, ranks.size):
        facts = json.loads(store.get(f"here/{rank}"))
        for name, value in lead.items():
            if facts.get(name) != value:
                raise GraftuneError(
                    f"{name} is {facts.get(name)} on rank {rank} and {value} on rank 0",
                    fix="start all ranks in the same environment",
                )


def _facts(ranks: Ranks) -> dict[str, Any]:
    """Facts that must be the same on every rank."""
    return {
        "the number of ranks": ranks.size,
        "graftune's version": __version__,
        "torch's version": torch.__version__,
        "Python's version": ".".join(map(str, sys.version_info[:2])),
    }


def is_broken(error: Exception) -> bool:
    """Whether a collective failed because a rank is gone."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "NCCL", "Connection", "Broken pipe"))
    )
