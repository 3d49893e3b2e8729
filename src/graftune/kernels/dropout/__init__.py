"""Dropout whose mask is a function of (seed, mask_id, element). So the backward recomputes the mask instead of saving
it, a resumed run has the masks of an uninterrupted one, and a GPU drops the same values as a CPU. See reference.py."""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.dropout import reference

__all__ = ["apply"]


@launch.operation("adapters")
def apply(x: torch.Tensor, p: float, seed: torch.Tensor, mask_id: int) -> torch.Tensor:
    """Zero a share p of x's values and divide the rest by 1 - p. `seed` is an int64 scalar on x's device, so that it
    can change between replays; `mask_id` (below 2^32) distinguishes the dropouts of one step."""
    assert 0.0 <= p < 1.0 and 0 <= mask_id < 2**32 and x.is_contiguous() and x.numel() <= 2**32
    assert seed.dim() == 0 and seed.dtype == torch.int64
    return launch.implementation(reference, x).apply(x, p, seed, mask_id)
