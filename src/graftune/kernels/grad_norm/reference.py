"""The clip, as one factor a segment: [norm of the mean gradient, factor to apply to the summed gradient].

    norm = ||g|| / divisor      factor = min(1, clip / (norm + 1e-6)) / divisor

The divisor (response tokens of the step) and the clip are folded into one factor, so the gradient is read once more
by the update and never rewritten. Nothing is fetched: both figures stay where the gradient is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def norms(grads: torch.Tensor, segments: Sequence[Sequence[slice]]) -> torch.Tensor:
    """L2 norm of each segment (a list of slices of the flat gradient), fp32."""
    squares = [torch.stack([grads[part].square().sum() for part in segment]).sum() for segment in segments]
    return torch.stack(squares).sqrt()


def clip_factors(norms: torch.Tensor, divisor: torch.Tensor, clip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(total norm of the mean gradient, factor a segment). clip 0 means no clipping."""
    mean_norms = norms / divisor
    factors = torch.where(clip > 0, (clip / (mean_norms + 1e-6)).clamp(max=1.0), torch.ones_like(mean_norms))
    return mean_norms.square().sum().sqrt(), factors / divisor
