"""RMS norm over the last dimension. x [..., D], weight [D] fp32; fp32 inside, result in x's dtype.

`add_forward` and `add_backward` are the norm inside a block, with the residual add beside it.
"""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.rms_norm import reference
from graftune.kernels.rms_norm.reference import backward, forward

__all__ = ["add_backward", "add_forward", "apply", "backward", "forward"]


@launch.operation("norm")
def add_forward(
    x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, y [T, D] -> (s = x + y, rstd [T] fp32); norm(s) is written to `out`, whose rows may lie apart.

    y is overwritten by the sum; without y the sum is x itself, whose rows may then lie apart, too."""
    assert x.stride(1) == 1 and (y is None or (y.shape == x.shape and y.is_contiguous() and x.is_contiguous()))
    assert out.shape == x.shape and out.stride(1) == 1
    return launch.best(reference, x).add_forward(x, y, weight, eps, out)


@launch.operation("norm")
def apply(x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The norm of x [T, D] again, bit for bit, from the rstd [T] that the forward left."""
    assert x.is_contiguous() and rstd.shape == x.shape[:1]
    return launch.best(reference, x).apply(x, rstd, weight)


@launch.operation("norm")
def add_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    grad_weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of the stream [T, D]: the norm's, given its output's, plus `residual`, which is overwritten by it unless
    there is an `out`. The rows of all may lie apart."""
    assert x.stride(1) == grad_y.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    assert out is None or (out.shape == x.shape and out.stride(1) == 1)
    return launch.best(reference, x).add_backward(grad_y, x, rstd, weight, residual, grad_weight, out)
