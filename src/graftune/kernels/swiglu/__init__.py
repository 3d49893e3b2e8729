"""Gated linear units on a fused gate/up product: act(gate) * up, with silu (SwiGLU), tanh's gelu (GeGLU), or gpt-oss's
clamped unit.

gate_up [T, 2F] -> [T, F], computed in fp32. All tensors may have any row stride."""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.swiglu import reference

__all__ = ["KINDS", "backward", "forward"]

KINDS = ("silu", "gelu", "clamped")


@launch.operation("gated unit")
def forward(gate_up: torch.Tensor, act: torch.Tensor, kind: str = "silu") -> None:
    """Write the activation [T, F] to `act`."""
    assert gate_up.shape == (len(act), 2 * act.shape[1]) and gate_up.stride(1) == act.stride(1) == 1
    assert kind in KINDS, kind
    launch.implementation(reference, gate_up).forward(gate_up, act, kind)


@launch.operation("gated unit")
def backward(
    grad: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor, act: torch.Tensor, kind: str = "silu",
    weights: torch.Tensor | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """Write the gradient of gate_up [T, 2F] to `out` and the activation [T, F] to `act`.

    With `weights` [T] (fp32, of a mixture's rows), the gradient of row t is weights[t] * grad[t], and the gradients of
    the weights are returned: grad[t] times the activation, [T] fp32.

    On a GPU, `out` may be gate_up itself and `act` may be `grad`: the kernel reads each value before it writes it."""
    assert gate_up.shape == out.shape and grad.shape == act.shape and kind in KINDS
    assert grad.stride(1) == gate_up.stride(1) == out.stride(1) == act.stride(1) == 1
    assert weights is None or (weights.shape == (len(grad),) and weights.is_contiguous())
    return launch.implementation(reference, grad).backward(grad, gate_up, out, act, kind, weights)
