"""Sums over the choices of a router: how many tokens each expert got, and the entropy of the scores. They are added to
partial sums on the device, a row for each program, which never use atomics: the order of a sum is fixed."""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.routing import reference

__all__ = ["PARTS", "add_"]

PARTS = 32  # rows of partial sums


@launch.operation("router")
def add_(sums: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, counted: torch.Tensor) -> None:
    """Add to sums [PARTS, W] (fp32), over the tokens that are counted (counted [T], 0 or 1): the tokens of each expert,
    and in the last two columns the sum of entropies and the number of tokens. W is at least E + 2. scores [T, E] need
    not sum to one; chosen [T, k]."""
    assert len(sums) == PARTS and sums.shape[1] >= scores.shape[1] + 2 and len(scores) == len(chosen) == len(counted)
    assert sums.is_contiguous() and scores.is_contiguous() and chosen.is_contiguous()
    launch.implementation(reference, scores).add_(sums, scores, chosen, counted)
