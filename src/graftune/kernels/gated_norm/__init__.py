"""RMS norm of each head, gated: rms_norm(x) * weight * silu(gate), computed in fp32.

x and gate [T, V * E] hold heads of E values; the weight [E] in fp32 is the same for all heads. All tensors may have any
row stride.
"""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.gated_norm import reference

__all__ = ["backward", "forward"]


@launch.operation("gated norm")
def forward(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Write the result [T, V * E] to `out`."""
    _check(x, gate, weight, out)
    launch.implementation(reference, x).forward(x, gate, weight, eps, out)


@launch.operation("gated norm")
def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_gate: torch.Tensor,
    mixed: torch.Tensor,
    grad_weight: torch.Tensor | None = None,
) -> None:
    """Write the gradients of x and gate, and the forward's result to `mixed`, which the next projection's adapter
    needs. Add the weight's gradient to `grad_weight` if given. `grad_x` may be x, `grad_gate` may be gate and `mixed`
    may be `grad`: every value is read before it is overwritten."""
    _check(x, gate, weight, grad)
    _check(grad_x, grad_gate, weight, mixed)
    assert grad_x.shape == x.shape
    implementation = launch.implementation(reference, x)
    implementation.backward(grad, x, gate, weight, eps, grad_x, grad_gate, mixed, grad_weight)


def _check(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    assert x.shape == gate.shape == out.shape and x.shape[1] % len(weight) == 0, (x.shape, gate.shape, out.shape)
    assert x.stride(1) == gate.stride(1) == out.stride(1) == 1 and weight.is_contiguous()
    assert weight.dtype == torch.float32
