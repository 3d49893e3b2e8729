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


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, N, H], rotated in place."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].float(), x[..., half:].float()
    kept = a * cos
    turned = torch.mul(a, sin)
    x[..., :half] = kept.addcmul_(b, sin, value=-1)
    x[..., half:] = turned.addcmul_(b, cos)
    return x


def unrotate_(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The gradient's way back, in place."""
    return rotate_(grad, cos, -sin)
