"""The low-rank product beside a frozen one: y += s * (x A') B', and its gradients.

    A (down) [R, in]    B (up) [out, R]    h = x A'    g = s * dY B
    dB = s * dY' h      dA = g' x          dX += g A

Projections that read the same x (q, k, v; gate, up) form a group: their A's are stacked, and their B's stand on the
diagonal of one [out, R * projections] matrix. So x, y and dY are each touched once for the whole group; multiplying
the zeros beside the diagonal costs less than touching them once a projection. The backward comes in two halves,
because x may be at hand only after dX is (SwiGLU's backward recomputes it). s is alpha/rank, applied in the products
and never baked into B: an adapter on disk is the adapter that trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Part(NamedTuple):
    """One projection of a group: its columns of y, its columns of h, and where its dB [out, R] adds up (fp32)."""

    columns: slice
    ranks: slice
    grad_up: torch.Tensor


def forward(y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """Adds the group's product into y [T, out] in place; returns h [T, R * projections], which the backward needs."""
    h = x @ down.t()
    y.addmm_(h, up.t(), alpha=scale)
    return h


def up_backward(
    grad_y: torch.Tensor, h: torch.Tensor, up: torch.Tensor, scale: float, parts: Sequence[Part]
) -> torch.Tensor:
    """First half: adds each projection's dB and returns g [T, R * projections]."""
    joint = h.t() @ grad_y  # [R * projections, out]; only the diagonal blocks are wanted
    for columns, ranks, grad_up in parts:
        grad_up.add_(joint[ranks, columns].t(), alpha=scale)
    return (grad_y @ up).mul_(scale)


def down_backward(g: torch.Tensor, x: torch.Tensor, grad_down: torch.Tensor) -> None:
    """Second half: adds dA = g' x into `grad_down` (fp32)."""
    if g.dtype == grad_down.dtype:
        grad_down.addmm_(g.t(), x)
    else:
        grad_down.add_(g.t() @ x)


def backward(
    grad_out: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(grad_down, grad_up) of one adapter for x [..., in] and grad_out [..., out]."""
    x, grad_out = x.reshape(-1, x.shape[-1]), grad_out.reshape(-1, grad_out.shape[-1])
    grad_up = (grad_out.t() @ (x @ down.t())).mul_(scale)
    grad_down = (grad_out @ up).t().mul(scale) @ x
    return grad_down, grad_up
