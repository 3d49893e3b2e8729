"""out = act(gate) * up, with gate and up the two halves of one [T, 2F] product.

    silu   x s               with s = sigmoid(x)                              slope  s + x s (1 - s)
    gelu   x (1 + t) / 2     with t = tanh(sqrt(2/pi) (x + 0.044715 x^3))     slope  (1 + t + x t') / 2

The clamped unit (gpt-oss) is x s (up + 1) with s = sigmoid(1.702 x), where x is the gate, at most 7, and up lies
between -7 and 7; beyond these limits the gradient is zero.

Backward: d up = grad * act(gate); d gate = grad * up * slope. It returns the activation too: the down projection's
adapter needs it, and recomputing it costs less than keeping it. Every operation computes in fp32 and rounds to the
tensor's dtype; converting whole tensors to fp32 would cost four times the memory traffic, which bounds the speed here.
"""

from __future__ import annotations

import torch

from graftune.private import find

LIMIT, ALPHA = 7.0, 1.702  # of the clamped unit
_silu = find("torch.ops.aten.silu.out")
_silu_backward = find("torch.ops.aten.silu_backward.grad_input")
_gelu_backward = find("torch.ops.aten.gelu_backward")


def forward(gate_up: torch.Tensor, act: torch.Tensor, kind: str = "silu") -> None:
    gate, up = gate_up.chunk(2, -1)
    if kind == "clamped":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        torch.mul(gate * torch.sigmoid(ALPHA * gate), up + 1, out=act)
        return
    torch.mul(_act(gate, kind), up, out=act)


def backward(
    grad: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor, act: torch.Tensor, kind: str = "silu",
    weights: torch.Tensor | None = None,
) -> torch.Tensor | None:  # fmt: skip
    if weights is None:
        _backward(grad, gate_up, out, act, kind)
        return None
    _backward(grad.mul(weights.to(grad.dtype).unsqueeze(1)), gate_up, out, act, kind)
    return (grad * act).sum(1, dtype=torch.float32)


def _backward(grad: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor, act: torch.Tensor, kind: str) -> None:
    gate, up = gate_up.chunk(2, -1)
    width = gate.shape[-1]
    if kind == "clamped":
        _clamped_backward(grad, gate, up, out, act)
        return
    if kind == "silu":
        _silu(gate, out=act)
    else:
        act.copy_(_act(gate, kind))
    torch.mul(grad, act, out=out[..., width:])
    if kind == "silu":
        _silu_backward(grad * up, gate, grad_input=out[..., :width])
    else:
        out[..., :width] = _gelu_backward(grad * up, gate, approximate="tanh")
    act.mul_(up)


def _clamped_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, act: torch.Tensor
) -> None:
    x, y = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    s, width = torch.sigmoid(ALPHA * x), gate.shape[-1]
    value, slope = x * s, s + ALPHA * x * s * (1 - s)
    out[..., width:] = grad * value * (up.abs() <= LIMIT)
    out[..., :width] = grad * (y + 1) * slope * (gate <= LIMIT)
    torch.mul(value, y + 1, out=act)


def _act(gate: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.nn.functional.silu(gate) if kind == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
