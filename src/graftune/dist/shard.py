"""Shards a frozen base over all ranks: a storage for model/bundles.py that gathers a bundle when it is used.

Each rank keeps one part of every bundle, and an all-gather brings the whole into the buffer: one collective per block,
forward and backward. A frozen weight has no gradient to scatter and no state, so the code need not know what the bytes
mean: 4-bit codes and their scales are gathered as bytes. (FSDP2 makes a DTensor of every parameter; quantised ones lose
their state in it.)

Every rank reads all of the file, which a node keeps in its page cache. So loading makes the same values, to the bit, as
on one rank, however the weight is quantised.

With `on_host` a rank's parts are in pinned host memory: a node then holds the base once, and each GPU's own link
carries only its part of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from graftune.arithmetic import ceil_div
from graftune.dist.world import World
from graftune.kernels import launch
from graftune.model.bundles import ALIGNMENT

PIECE = 256 << 20  # most bytes that are gathered at once

Gather = Callable[[torch.Tensor, torch.Tensor], object]  # into [size * n], a rank's own [n]


class Shards:
    """Keeps this rank's part of every bundle. `gather` is the collective; a plan passes one that does nothing."""

    collective = True

    def __init__(self, rank: int, size: int, gather: Gather, device: torch.device, *, on_host: bool = False):
        self.rank, self.size, self._gather, self.device = rank, size, gather, device
        self.on_host = on_host and launch.on_gpu(device)
        self.staged: torch.Tensor | None = None  # staging buffer for a rank's part from host memory

    def sizes(self, count: int) -> list[int]:
        unit = self.size * ALIGNMENT
        most = PIECE // unit * unit
        rest = count % most
        return [most] * (count // most) + ([ceil_div(rest, unit) * unit] if rest else [])

    def keep(self, piece: torch.Tensor) -> torch.Tensor:
        own = piece.view(self.size, -1)[self.rank]
        if not self.on_host:
            return own.clone()
        if self.staged is None or len(self.staged) < len(own):
            self.staged = torch.empty_like(own)
        return torch.empty(len(own), dtype=torch.uint8, device="cpu", pin_memory=True).copy_(own)

    def fetch(self, kept: torch.Tensor, into: torch.Tensor) -> None:
        if self.staged is not None:
            kept = self.staged[: len(kept)].copy_(kept, non_blocking=True)
        self._gather(into, kept)


def shards_of(world: World, device: torch.device, *, on_host: bool = False) -> Shards:
    """Shards that are gathered over the group of `world` for tensors on the device."""
    # torch 2.13 has a new name for it, and warns of the old one.
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def gather(into: torch.Tensor, own: torch.Tensor) -> None:
        collective(into, own, group=world.group)

    return Shards(world.rank, world.size, gather, device, on_host=on_host)
