"""decay = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), in fp32.

da = ddecay * -exp(A_log) sigmoid(a + dt_bias)        db = dbeta * beta (1 - beta)
dA_log = sum over tokens of ddecay * decay            ddt_bias = sum over tokens of da
"""

from __future__ import annotations

import torch


def forward(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, decay: torch.Tensor,
    beta: torch.Tensor,
) -> None:  # fmt: skip
    torch.mul(-a_log.exp(), torch.nn.functional.softplus(a.float() + dt_bias), out=decay)
    torch.sigmoid(b.float(), out=beta)


def backward(
    grad_decay: torch.Tensor, grad_beta: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor,
    dt_bias: torch.Tensor, grad_a: torch.Tensor, grad_b: torch.Tensor, grad_a_log: torch.Tensor | None,
    grad_dt_bias: torch.Tensor | None,
) -> None:  # fmt: skip
    shifted, rate, beta = a.float() + dt_bias, -a_log.exp(), torch.sigmoid(b.float())
    da = grad_decay * rate * torch.sigmoid(shifted)
    grad_a.copy_(da)
    grad_b.copy_(grad_beta * beta * (1 - beta))
    if grad_a_log is not None and grad_dt_bias is not None:
        grad_a_log += (grad_decay * rate * torch.nn.functional.softplus(shifted)).sum(0)
        grad_dt_bias += da.sum(0)
