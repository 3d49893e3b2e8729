"""Rotary positions in the Hugging Face layout: the first half of a head is rotated against its second half.

    out[:H/2] = a cos - b sin        out[H/2:] = b cos + a sin        with a, b the two halves

The rotation is orthogonal up to the scaling folded into cos and sin, so the backward is the same with sin negated.
"""

from __future__ import annotations

import torch


def tables(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, 1, H/2] in fp32; `scaling` is yarn's attention factor (1 elsewhere)."""
    angles = positions.to(torch.float32).unsqueeze(1) * inverse_frequencies.to(positions.device)
    return (angles.cos() * scaling).unsqueeze(1), (angles.sin() * scaling).unsqueeze(1)


def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, N, H] -> rotated, in x's dtype."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def backward(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return forward(grad, cos, -sin)
