"""y = x / sqrt(mean(x^2) + eps) * w, over the last dimension, in fp32 whatever the dtype of x.

The backward recomputes the reciprocal root from x instead of saving it: a norm is cheap beside a saved activation.
"""

from __future__ import annotations

import torch


def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * rstd).mul_(weight.float()).to(x.dtype)


def backward(
    grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, grad_weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Gradient of x; the weight's is added into `grad_weight` where given.

    With n = x * rstd and g = grad_y * w: grad_x = rstd * (g - n * mean(g * n)); grad_w = sum over rows of grad_y * n.
    """
    wide, grad = x.float(), grad_y.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    normed = wide * rstd
    if grad_weight is not None:
        grad_weight.add_((grad * normed).flatten(0, -2).sum(0))
    grad = grad * weight.float()
    mean = (grad * normed).mean(-1, keepdim=True)
    return torch.addcmul(grad, normed, mean, value=-1).mul_(rstd).to(x.dtype)
