"""Sums the flat gradients and the step's figures over all ranks, in the only collective of an optimizer step.

All trainable weights are in one buffer, so one all-reduce is enough, without the buckets and hooks that a list of
parameters needs. Over NCCL it is a node of the captured update. Gloo works on the host: there it runs between the
graphs, and the host waits for it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from graftune.dist.world import World


class GradientReduce:
    """Sums a flat buffer over all ranks, in place: every rank ends with the same bits."""

    def __init__(self, world: World):
        self.size, self.captured = world.size, world.captured
        self._group = world.group

    def __call__(self, sums: torch.Tensor) -> None:
        dist.all_reduce(sums, group=self._group)
