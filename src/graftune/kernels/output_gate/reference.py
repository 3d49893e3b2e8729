"""out = x s with s = sigmoid(gate).

Backward: dx = grad s; d gate = grad x s (1 - s), summed over a head that has one gate.
"""

from __future__ import annotations

import torch


def forward(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.float() * gate.float().sigmoid())


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    grad_x: torch.Tensor,
    grad_gate: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    share = gate.float().sigmoid()
    gated = x.float() * share
    if out is not None:
        out.copy_(gated)
    through = gated.mul_(grad)
    if gate.shape[2] == 1:
        through = through.sum(2, keepdim=True)
    grad_gate.copy_(through * (1 - share))
    grad_x.copy_(share * grad)
