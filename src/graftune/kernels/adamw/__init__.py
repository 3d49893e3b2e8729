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
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in (weights, grads, m, v, row, factors))
    assert (count.dtype, ok.dtype) == (torch.int64, torch.bool)
    launch.implementation(reference, weights).step(weights, grads, m, v, compute, table, row, count, ok, factors)
