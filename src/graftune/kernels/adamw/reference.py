"""AdamW over a flat fp32 buffer, with hyperparameters and the update count read from device tensors.

    m = b1 m + (1-b1) g     v = b2 v + (1-b2) g^2
    w = w - lr * ( (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) + decay * w )

`ok` is a device flag: if it is 0, weights and moments stay as they are and only the gradient is zeroed, so a non-finite
gradient costs one step and no state (`grad_norm.clip` has not counted the update then). Moments are updated with
where(), not by multiplying with the flag, because 0 * inf is not 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graftune.kernels import launch
from graftune.kernels.blocks import BlockTable


class Hyper(NamedTuple):
    """The hyperparameters as 0-dim fp32 tensors on the device, so that they can change between replays."""

    lr: torch.Tensor
    beta1: torch.Tensor
    beta2: torch.Tensor
    eps: torch.Tensor
    weight_decay: torch.Tensor
    divisor: torch.Tensor
    clip: torch.Tensor


def update(
    weights: torch.Tensor,
    grads: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    factor: torch.Tensor,
    hyper: Hyper,
    count: torch.Tensor,
    ok: torch.Tensor,
    decay: bool,
) -> None:
    """Update a slice of the arena in place. `count` is the number of the update, from 1; `factor` the clip factor."""
    g = grads * factor
    torch.where(ok, torch.lerp(g, m, hyper.beta1), m, out=m)
    torch.where(ok, torch.lerp(g.square_(), v, hyper.beta2), v, out=v)
    steps = count.to(torch.float32)
    denominator = (v / (1 - hyper.beta2**steps)).sqrt_().add_(hyper.eps)
    change = (m / (1 - hyper.beta1**steps)).div_(denominator)
    if decay:
        change.addcmul_(weights, hyper.weight_decay.expand_as(weights))
    torch.where(ok, torch.addcmul(weights, change, hyper.lr.expand_as(change), value=-1), weights, out=weights)


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
    """Update the whole arena piece by piece, so that temporaries stay small."""
    hyper = Hyper(*row.unbind())
    for start, stop, segment, decay in table.pieces():
        w, g, copy = weights[start:stop], grads[start:stop], compute[start:stop]
        update(w, g, m[start:stop], v[start:stop], factors[segment], hyper, count, ok, decay)
        if launch.address(compute) != launch.address(weights):
            copy.copy_(torch.where(ok, w, copy))
        g.zero_()
