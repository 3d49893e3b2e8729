"""out = n w silu(z), with n = x / sqrt(mean(x^2) + eps) over each head, in fp32.

dz = grad n w silu'(z)        dw = sum over rows of grad n silu(z)        dx from g = grad w silu(z) as in rms_norm
"""

from __future__ import annotations

import torch


def forward(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    n, _ = _normed(x, weight, eps)
    out.copy_((n * weight).flatten(1) * torch.nn.functional.silu(gate.float()))


def backward(
    grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, grad_x: torch.Tensor,
    grad_gate: torch.Tensor, mixed: torch.Tensor, grad_weight: torch.Tensor | None,
) -> None:  # fmt: skip
    n, rstd = _normed(x, weight, eps)
    grad_out, z = (heads.float().unflatten(1, (-1, len(weight))) for heads in (grad, gate))
    share = torch.sigmoid(z)
    act, slope = z * share, share * (1 + z * (1 - share))
    through = grad_out * act
    if grad_weight is not None:
        grad_weight += (through * n).sum((0, 1))
    result, gate_result = n * weight * act, grad_out * n * weight * slope
    through = through * weight
    x_result = rstd * (through - n * (through * n).mean(-1, keepdim=True))
    for to, value in ((mixed, result), (grad_gate, gate_result), (grad_x, x_result)):  # may be what was read above
        to.copy_(value.flatten(1))


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x of each head [T, V, E] divided by its root mean square, and that factor [T, V, 1]."""
    heads = x.float().unflatten(1, (-1, len(weight)))
    rstd = torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)
    return heads * rstd, rstd
