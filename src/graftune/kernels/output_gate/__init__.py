"""The gate on attention's output: out = x * sigmoid(gate), before the output projection.

x [T, N, H]; gate [T, N, H], or [T, N, 1]: one value for each head. All tensors may have any row stride, and gates any
distance between heads: they are columns of the qkv product. Computed in fp32."""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.output_gate import reference

__all__ = ["backward", "forward"]


@launch.operation("output gate")
def forward(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    """Write the gated output [T, N, H] to `out`."""
    _check(x, gate, out)
    launch.implementation(reference, x).forward(x, gate, out)


@launch.operation("output gate")
def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    grad_x: torch.Tensor,
    grad_gate: torch.Tensor,
    out: torch.Tensor | None = None,
) -> None:
    """Write the gradients of x and of the gate, and to `out`, if given, the gated output again: the adapter of the
    output projection reads it, and recomputing it costs less than keeping it. `grad_x` may be `grad` itself."""
    _check(x, gate, grad, grad_x, *(() if out is None else (out,)))
    assert grad_gate.shape == gate.shape and (gate.shape[2] == 1 or grad_gate.stride(2) == 1)
    launch.implementation(reference, x).backward(grad, x, gate, grad_x, grad_gate, out)


def _check(x: torch.Tensor, gate: torch.Tensor, *others: torch.Tensor) -> None:
    tokens, heads, width = x.shape
    assert gate.shape in ((tokens, heads, width), (tokens, heads, 1)), (gate.shape, x.shape)
    assert gate.shape[2] == 1 or gate.stride(2) == 1
    for each in (x, *others):
        assert each.shape == x.shape and each.stride(2) == 1 and (each.stride(1) == width or heads == 1)
