"""RMS norm over the last dimension: x [..., D], weight [D] in fp32. It computes in fp32 and returns x's dtype.

`add_forward` and `add_backward` are the norm inside a block, fused with the residual add. `forward` and `backward` are
plain torch on every device.
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
    """x, y [T, D] -> (s = x + y, rstd [T] fp32); writes norm(s) to `out`, which may have any row stride.

    Overwrites y with the sum. Without y the sum is x itself, and x may have any row stride too."""
    assert x.stride(1) == 1 and (y is None or (y.shape == x.shape and y.is_contiguous() and x.is_contiguous()))
    assert out.shape == x.shape and out.stride(1) == 1
    return launch.implementation(reference, x).add_forward(x, y, weight, eps, out)


@launch.operation("norm")
def apply(x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Recompute the norm of x [T, D] from the forward's rstd [T], identical to the bit."""
    assert x.is_contiguous() and rstd.shape == x.shape[:1]
    return launch.implementation(reference, x).apply(x, rstd, weight)


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
    """Gradient of the residual stream [T, D]: the norm's input gradient for `grad_y`, plus `residual`. Writes it to
    `out`, or over `residual` if there is no `out`. All tensors may have any row stride."""
    assert x.stride(1) == grad_y.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    assert out is None or (out.shape == x.shape and out.stride(1) == 1)
    return launch.implementation(reference, x).add_backward(grad_y, x, rstd, weight, residual, grad_weight, out)
