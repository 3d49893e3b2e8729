"""Dropout whose mask is a function of (seed, mask_id, element): the backward computes it again instead of saving it, a
resumed run has the masks of an uninterrupted one, and a GPU drops what a CPU drops. See reference.py."""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.dropout import reference

__all__ = ["apply"]


@launch.operation("adapters")
def apply(x: torch.Tensor, p: float, seed: torch.Tensor, mask_id: int) -> torch.Tensor:
    """x with a share p of its values zero and the rest divided by 1 - p. `seed` is an int64 scalar beside x, so that a
    captured step can change it; `mask_id` (below 2^32) tells the dropouts of one step apart."""
    assert 0.0 <= p < 1.0 and 0 <= mask_id < 2**32 and x.is_contiguous() and x.numel() <= 2**32
    assert seed.dim() == 0 and seed.dtype == torch.int64
    return launch.implementation(reference, x).apply(x, p, seed, mask_id)
