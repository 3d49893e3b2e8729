"""The low-rank product beside a frozen one: y += s * (x A') B', and its gradients.

    A (down) [R, in]    B (up) [out, R]    h = x A'    g = s * dY B
    dB = s * dY' h      dA = g' x          dX += g A

The backward comes in two halves, because x may be at hand only after dX is (SwiGLU's backward recomputes it).
Projections that read the same x (q, k, v; gate, up) form a group: their A's are stacked so that x is read once.
s is alpha/rank, applied in the products and never baked into B: an adapter on disk is the adapter that trains.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Up = tuple[slice, torch.Tensor]  # columns of y that this projection writes, and its B [out, R]


def forward(y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, ups: Sequence[Up], scale: float) -> torch.Tensor:
    """Adds the group's product into y [T, out] in place; returns h [T, R * projections], which the backward needs."""
    h = x @ down.t()
    for (columns, up), part in zip(ups, h.chunk(len(ups), 1), strict=True):
        y[:, columns].addmm_(part, up.t(), alpha=scale)
    return h


def up_backward(
    grad_y: torch.Tensor, h: torch.Tensor, ups: Sequence[Up], scale: float, grad_ups: Sequence[torch.Tensor]
) -> torch.Tensor:
    """First half: adds dB of each projection into `grad_ups` (fp32) and returns g [T, R * projections]."""
    g = torch.empty_like(h)
    parts = zip(ups, grad_ups, h.chunk(len(ups), 1), g.chunk(len(ups), 1), strict=True)
    for (columns, up), grad_up, h_part, g_part in parts:
        grad = grad_y[:, columns]
        accumulate(grad_up, grad.t(), h_part, scale)
        g_part.copy_((grad @ up).mul_(scale))
    return g


def down_backward(g: torch.Tensor, x: torch.Tensor, grad_down: torch.Tensor) -> None:
    """Second half: adds dA = g' x into `grad_down` (fp32)."""
    accumulate(grad_down, g.t(), x, 1.0)


def accumulate(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    """into += scale * a @ b, `into` in fp32 whatever the factors are."""
    if a.dtype == into.dtype:
        into.addmm_(a, b, alpha=scale)
    else:
        into.add_(a @ b, alpha=scale)


def backward(
    grad_out: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(grad_down, grad_up) of one adapter for x [..., in] and grad_out [..., out]."""
    x, grad_out = x.reshape(-1, x.shape[-1]), grad_out.reshape(-1, grad_out.shape[-1])
    grad_up = (grad_out.t() @ (x @ down.t())).mul_(scale)
    grad_down = (grad_out @ up).t().mul(scale) @ x
    return grad_down, grad_up
