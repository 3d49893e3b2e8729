"""Low-rank adapters of frozen projections.

The decoder uses these functions on groups of projections that share their input (reference.py has the formulas).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graftune.kernels import launch, rms_norm
from graftune.kernels.lora_linear import reference
from graftune.kernels.lora_linear.reference import Copy, LowRank, add_, add_input_grad_, add_product_, members

__all__ = [
    "Copy",
    "LowRank",
    "add_",
    "add_input_grad_",
    "add_product_",
    "down",
    "down_backward",
    "members",
    "spread",
    "up_backward",
    "up_both",
    "up_grad",
]

THIN = 64  # columns up to which our kernels compute a product; wider ones run well in a matrix library


@launch.operation("adapters")
def down(x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor | None = None) -> torch.Tensor:
    """h = x A' for x [T, in] and weight [R * members, in]. If there is a `tail`, h is also written to its first
    columns and the others are zeroed."""
    if launch.fused(x) and len(weight) <= THIN:
        from graftune.kernels.lora_linear import kernel

        return kernel.rows(x, weight, ((0, x.shape[1]),), rank=len(weight), transposed=True, tail=tail)
    return _filled(tail, x @ weight.t())


@launch.operation("adapters")
def up_backward(grad_y: torch.Tensor, low: LowRank, tail: torch.Tensor | None = None) -> torch.Tensor:
    """g = s dY B, [T, R * members], also written to `tail` (see `down`)."""
    if launch.fused(grad_y) and low.rank <= THIN:
        from graftune.kernels.lora_linear import kernel

        return kernel.rows(grad_y, low.up, low.columns, rank=low.rank, scale=low.scale, tail=tail)
    return _filled(tail, reference.up_backward(grad_y, low))


def up_grad(grad_y: torch.Tensor, low: LowRank, grad_up: torch.Tensor) -> None:
    """Add dB = s dY' h to `grad_up` [sum of outs, R] (fp32)."""
    if launch.fused(grad_y) and low.rank <= THIN:
        from graftune.kernels.lora_linear import sums

        sums.sum_columns_(grad_up, grad_y, low.h, low.columns, rank=low.rank, scale=low.scale)
    else:
        reference.up_grad(grad_y, low, grad_up)


@launch.operation("adapters")
def up_both(
    grad_y: torch.Tensor, low: LowRank, grad_up: torch.Tensor, tail: torch.Tensor | None = None
) -> torch.Tensor:
    """`up_backward` and `up_grad`; our kernel does both in one pass over dY."""
    if launch.fused(grad_y) and low.rank <= THIN:
        from graftune.kernels.lora_linear import sums

        return sums.both(grad_up, grad_y, low.h, low.up, low.columns, rank=low.rank, scale=low.scale, tail=tail)
    up_grad(grad_y, low, grad_up)
    return up_backward(grad_y, low, tail)


def _filled(tail: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    if tail is not None:
        tail[:, : values.shape[1]].copy_(values)
        tail[:, values.shape[1] :].zero_()
    return values


@launch.operation("adapters to their weights")
def spread(copies: Sequence[Copy], tables: dict[str, torch.Tensor]) -> None:
    """target = scale * source for each copy. On a GPU this is one launch; its table is built at the first call."""
    if copies:
        launch.implementation(reference, copies[0].source, "copies").spread(copies, tables)


def down_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    grad_down: torch.Tensor,
    *,
    rstd: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
) -> None:
    """Add dA = g' x to `grad_down` [R * members, in] (fp32). With a norm's `rstd` [T] and `weight` [in], x is the
    norm's input and the adapter read n = x * rstd * weight. Then dA = (g * rstd)' x * weight, so n is not stored. (In
    fp16 the kernel multiplies x by rstd instead, in registers, because g * rstd may underflow.)"""
    assert (rstd is None) == (weight is None)
    if launch.fused(x) and len(grad_down) <= THIN:
        from graftune.kernels.lora_linear import sums

        sums.sum_columns_(
            grad_down, x, g, ((0, x.shape[1]),), rank=len(grad_down), transposed=True, row_scale=rstd, col_scale=weight
        )
        return
    if rstd is not None and weight is not None:
        x = rms_norm.apply(x, rstd, weight)
    reference.down_backward(g, x, grad_down)
