"""act = silu(gate) * up, with gate and up the two halves of one [T, 2F] product.

Backward, with s = sigmoid(gate): d up = grad * silu(gate); d gate = grad * up * (s + silu(gate) * (1 - s)).
It hands back the activation too: what learns behind it needs it, and recomputing costs less than its memory.
Every operation computes in fp32 and rounds to the tensor's dtype; widening whole tensors instead costs four times the
traffic, which is what this is made of.
"""

from __future__ import annotations

import torch


def forward(gate_up: torch.Tensor, act: torch.Tensor) -> None:
    gate, up = gate_up.chunk(2, -1)
    torch.mul(torch.nn.functional.silu(gate), up, out=act)


def backward(grad: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor, act: torch.Tensor) -> None:
    """Writes the gradient of gate_up [T, 2F] to `out` and the activation [T, F] to `act`."""
    gate, up = gate_up.chunk(2, -1)
    width = gate.shape[-1]
    torch.ops.aten.silu.out(gate, out=act)
    torch.mul(grad, act, out=out[..., width:])
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=out[..., :width])
    act.mul_(up)
