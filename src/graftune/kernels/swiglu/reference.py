"""act = silu(gate) * up, with gate and up the two halves of one [T, 2F] product.

Backward, with s = sigmoid(gate): d up = grad * silu(gate); d gate = grad * up * (s + silu(gate) * (1 - s)).
It hands back the activation too: the down projection's adapter needs it, and recomputing costs less than its memory.
Every operation computes in fp32 and rounds to the tensor's dtype; widening whole tensors instead costs four times the
traffic, which is what this is made of.
"""

from __future__ import annotations

import torch


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate).mul_(up)


def backward(grad: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of gate_up [T, 2F], the activation [T, F])."""
    gate, up = gate_up.chunk(2, -1)
    silu = torch.nn.functional.silu(gate)
    out = torch.empty_like(gate_up)
    width = gate.shape[-1]
    torch.mul(grad, silu, out=out[..., width:])
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=out[..., :width])
    return out, silu.mul_(up)
