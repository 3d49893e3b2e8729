"""Gradient norm and clip factors over the flat arena; decides whether an update is skipped. See reference.py.

A step calls `clip`, which computes everything that `adamw.step` needs. `norms` and `clip_factors` are its formulas.
"""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.blocks import BlockTable
from graftune.kernels.grad_norm import reference
from graftune.kernels.grad_norm.reference import clip_factors, norms, rescale

__all__ = ["clip", "clip_factors", "norms", "rescale"]


@launch.operation("gradient norm")
def clip(
    grads: torch.Tensor,
    table: BlockTable,
    row: torch.Tensor,
    loss_sum: torch.Tensor,
    count: torch.Tensor,
    report: torch.Tensor,
    factors: torch.Tensor,
    ok: torch.Tensor,
    scaler_state: torch.Tensor | None,
    partials: torch.Tensor,
) -> None:
    """Read the summed gradient once and write everything that the update needs, on the device.

    grads [n] fp32: summed over tokens, times the loss scale if there is one
    row [7] fp32: the hyperparameters, in the order of adamw.Hyper; divisor and clip are read
    loss_sum [] fp32: never scaled; read, then zeroed for the next step
    count [] int64: += 1 if the update is to be made
    report [3] fp32: written: mean loss, norm of the mean gradient before clipping, 1 if skipped
    factors [segments] fp32: written: the factors for the summed gradient
    ok [] bool: written: whether norm and loss are finite
    scaler_state [2] fp32: loss scale and good updates since it changed; the scale is read, then updated
    partials [blocks] fp32: scratch of the kernels
    """
    assert all(
        x.dtype == torch.float32 and x.is_contiguous() for x in (grads, row, loss_sum, report, factors, partials)
    )
    assert (count.dtype, ok.dtype) == (torch.int64, torch.bool)
    implementation = launch.implementation(reference, grads)
    implementation.clip(grads, table, row, loss_sum, count, report, factors, ok, scaler_state, partials)
