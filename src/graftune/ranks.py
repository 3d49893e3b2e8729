"""Reads which process of a run this one is, from the environment that torchrun sets up.

It is read before torch is imported, because only rank 0 prints. A process that no launcher has started is the only one
of its run and uses nothing of torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from graftune.errors import GraftuneError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Share(NamedTuple):
    """One rank's share of work that is divided among `size` ranks."""

    rank: int = 0
    size: int = 1


WHOLE = Share()


@dataclass(frozen=True)
class Ranks:
    """This process's rank among `size`, its number on this machine, and the address of the rendezvous."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    agent_store: bool = False  # torchrun's agent serves the store; without it rank 0 does
    restarts: int = 0  # how often the launcher has started all ranks again
    max_restarts: int = 0

    @property
    def leads(self) -> bool:
        return self.rank == 0


def from_environment(environment: Mapping[str, str] | None = None) -> Ranks | None:
    """The ranks from a launcher's variables; None where no launcher has started this process."""
    found = os.environ if environment is None else environment
    given = [name for name in NAMES if found.get(name)]
    if "LOCAL_RANK" not in given and found.get("WORLD_SIZE", "1") in ("", "1"):
        return None  # clusters set these variables also for a job of one process
    missing = [name for name in NAMES if name not in given]
    if missing:
        raise GraftuneError(
            f"WORLD_SIZE is {found.get('WORLD_SIZE', 'missing')} and {missing[0]} is not set",
            where="environment",
            fix="start all ranks with torchrun, or unset WORLD_SIZE and LOCAL_RANK",
        )
    rank, size, local = (_number(found, name) for name in NAMES[:3])
    local_size = _number(found, "LOCAL_WORLD_SIZE", size)
    if not (rank < size and local < local_size <= size):
        raise GraftuneError(
            f"rank {rank} of {size}, on this machine {local} of {local_size}, cannot be",
            where="environment",
            fix="start all ranks with torchrun",
        )
    return Ranks(
        rank=rank,
        size=size,
        local_rank=local,
        local_size=local_size,
        host=found["MASTER_ADDR"],
        port=_number(found, "MASTER_PORT"),
        agent_store=found.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=_number(found, "TORCHELASTIC_RESTART_COUNT", 0),
        max_restarts=_number(found, "TORCHELASTIC_MAX_RESTARTS", 0),
    )


def _number(found: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = found.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise GraftuneError(
            f"{name} is {text!r} and has to be a number", where="environment", fix="start all ranks with torchrun"
        )
    return int(text)
