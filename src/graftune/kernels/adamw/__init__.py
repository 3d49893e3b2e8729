"""AdamW on the flat arena. A non-finite gradient skips the update, on the device. reference.py has the formulas.

`step` uses the factors and the flag that `grad_norm.clip` computed; `update` is the formula on one slice.
"""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.adamw import reference
from graftune.kernels.adamw.reference import Hyper, update
from graftune.kernels.blocks import BlockTable

__all__ = ["Hyper", "step", "update"]


@launch.operation("AdamW")
def step(
    weights: torch.Tensor,
    grads: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    compute: torch.Tensor,
    table: BlockTable,
    row: torch.Tensor,
    count: torch.Tensor,
    ok: torch.Tensor,
    factors: torch.Tensor,
) -> None:
    """Update the spans of the table and zero their gradient; if `ok` is false, only zero the gradient.

    weights, grads, m, v [n] fp32; compute [n]: the copy that products read, in its own dtype, or `weights` itself
    row [7] fp32: the hyperparameters, in the order of Hyper
    count [] int64: the number of this update, from 1
    ok [] bool; factors [segments] fp32: from grad_norm.clip
    """
    assert weights.dim() == 1 and compute.shape == weights.shape and compute.is_contiguous()
    for x in (weights, grads, m, v):
        assert x.dtype == torch.float32 and x.shape == weights.shape and x.is_contiguous()
    assert all(span.stop <= len(weights) for span in table.spans)
    assert row.shape == (len(Hyper._fields),) and row.dtype == torch.float32 and row.is_contiguous()
    assert factors.shape == (table.segments,) and factors.dtype == torch.float32 and factors.is_contiguous()
    assert (count.dtype, ok.dtype) == (torch.int64, torch.bool) and count.numel() == ok.numel() == 1
    launch.implementation(reference, weights).step(weights, grads, m, v, compute, table, row, count, ok, factors)
