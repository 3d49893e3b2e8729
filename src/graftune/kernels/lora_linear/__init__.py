"""Low-rank adapters beside a frozen product.

`backward(grad_out, x, down, up, scale)` is the bare operation on one adapter, for 2-D and 3-D input; `forward`,
`up_backward` and `down_backward` are what the decoder uses, on projections that share their input.
"""

from __future__ import annotations

import torch

from graftune.errors import GraftuneError
from graftune.kernels.lora_linear import reference
from graftune.kernels.lora_linear.reference import Part, down_backward, forward, up_backward

__all__ = ["Part", "backward", "down_backward", "forward", "up_backward"]


def backward(
    grad_out: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of down [R, in] and up [out, R], given x [T, in] or [B, T, in] and grad_out of y's shape."""
    rank, width_in = down.shape
    if up.dim() != 2 or up.shape[1] != rank:
        raise GraftuneError(
            f"up is {tuple(up.shape)}", mend=f"it must be [out, {rank}] to follow down {tuple(down.shape)}"
        )
    if x.dim() not in (2, 3) or x.shape[-1] != width_in:
        raise GraftuneError(
            f"x is {tuple(x.shape)}", mend=f"it must be [tokens, {width_in}] or [batch, tokens, {width_in}]"
        )
    if grad_out.shape != (*x.shape[:-1], up.shape[0]):
        raise GraftuneError(f"grad_out is {tuple(grad_out.shape)}", mend=f"it must be {(*x.shape[:-1], up.shape[0])}")
    return reference.backward(grad_out, x, down, up, scale)
