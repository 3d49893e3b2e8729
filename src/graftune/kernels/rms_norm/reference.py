"""y = x / sqrt(mean(x^2) + eps) * w, over the last dimension, in fp32 whatever the dtype of x.

In a block, the norm and the residual add are one operation, forward and backward. The sum is rounded to its dtype
before the norm, so that the stored stream is exactly the norm's input.
"""

from __future__ import annotations

import torch


def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x32 = x.float()
    rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True).add_(eps))
    return (x32 * rstd).mul_(weight.float()).to(x.dtype)


def backward(
    grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, grad_weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Gradient of x. Adds the weight's gradient to `grad_weight` if given.

    With n = x * rstd and g = grad_y * w: grad_x = rstd * (g - n * mean(g * n)); grad_w = sum over rows of grad_y * n.
    """
    x32 = x.float()
    rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True).add_(eps))
    return _backward(grad_y.float(), x32, rstd, weight, grad_weight).to(x.dtype)


def add_forward(
    x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + y, rstd [T] fp32); writes the norm of the sum to `out` and the sum over y."""
    if y is not None:
        x = y.add_(x)
    x32 = x.float()
    rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True).add_(eps))
    out.copy_((x32 * rstd).mul_(weight.float()))
    return x, rstd.squeeze(-1)


def apply(x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Recompute the norm from the forward's rstd."""
    return (x.float() * rstd.unsqueeze(1)).mul_(weight.float()).to(x.dtype)


def add_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of the residual stream: the norm's plus `residual`, written to `out` or over `residual`."""
    grad = _backward(grad_y.float(), x.float(), rstd.unsqueeze(1), weight, grad_weight).to(x.dtype)
    if out is None:
        return grad if residual is None else residual.add_(grad)
    return out.copy_(grad) if residual is None else torch.add(residual, grad, out=out)


def _backward(
    grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, grad_weight: torch.Tensor | None
) -> torch.Tensor:
    normed = x * rstd
    if grad_weight is not None:
        grad_weight.add_((grad * normed).flatten(0, -2).sum(0))
    grad = grad * weight.float()
    mean = (grad * normed).mean(-1, keepdim=True)
    return torch.addcmul(grad, normed, mean, value=-1).mul_(rstd)
