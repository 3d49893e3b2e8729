"""act = silu(gate) * up, with gate and up the two halves of one [T, 2F] product.

Backward, with s = sigmoid(gate): d up = grad * silu(gate); d gate = grad * up * (s + silu(gate) * (1 - s)).
It hands back the activation too: the down projection's adapter needs it, recomputing is cheaper than its memory, and
the one expensive part, the exponential, is there already.
"""

from __future__ import annotations

import torch


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate.float()).mul_(up).to(gate_up.dtype)


def backward(grad: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of gate_up [T, 2F], the activation [T, F])."""
    gate, up = gate_up.float().chunk(2, -1)
    grad = grad.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    out = torch.empty_like(gate_up)
    grad_gate, grad_up = out.chunk(2, -1)
    grad_up.copy_(grad * silu)
    act = (silu * up).to(gate_up.dtype)
    slope = torch.addcmul(sigmoid, silu, 1 - sigmoid)  # d silu / d gate
    grad_gate.copy_(slope.mul_(grad).mul_(up))
    return out, act
