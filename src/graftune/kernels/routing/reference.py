"""entropy = -sum over e of p_e log p_e, with p = scores / sum(scores); a score of zero adds nothing."""

from __future__ import annotations

import torch


def add_(sums: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, counted: torch.Tensor) -> None:
    """Adds everything to the first row of `sums`."""
    p = scores / scores.sum(1, keepdim=True)
    entropy = -(p * p.clamp_min(1e-30).log()).sum(1)
    weights = counted.float().unsqueeze(1).expand_as(chosen)
    sums[0].scatter_add_(0, chosen.flatten(), weights.flatten())
    sums[0, -2] += (entropy * counted).sum()
    sums[0, -1] += counted.sum()
