"""Keys and values that are used outside their layer's forward: those of the past, which generation keeps in the pages
of a pool (kernels/paged_attention), and those that later layers of the same pass share.

Legend: T tokens, R rows, K key heads, H head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from graftune.kernels.rope.reference import added_up
from graftune.model.context import LayerCache, PassContext, RowCopy


class KeyValues(LayerCache):
    """Keys and values of one layer, [R, K, H]."""

    def __init__(self, window: int, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.window = window
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)

    def copy_(self, slots: RowCopy, rows: Mapping[int, RowCopy]) -> None:
        source, target = rows[self.window]
        for held in (self.keys, self.values):
            held.index_copy_(0, target, held.index_select(0, source))


class SharedKeys(NamedTuple):
    """The keys and values that a layer leaves for later ones in `PassContext.shared`: [T, K, H], as attention reads
    them."""

    k: torch.Tensor
    v: torch.Tensor


def add_grads(ctx: PassContext, layer: int, key_heads: int, grads: tuple[torch.Tensor, ...]) -> None:
    """Add dk and dv of a layer that uses the keys and values of `layer` to their sums, which are fp32 because twenty
    layers may share one. `grads`: (dq, dk, dv)."""
    found = [added_up(grad, key_heads) for grad in grads[1:]]
    sums = ctx.shared_grads.get(layer)
    if sums is None:
        ctx.shared_grads[layer] = [grad.float() for grad in found]
        return
    for total, grad in zip(sums, found, strict=True):
        total.add_(grad)


def take_grads(ctx: PassContext, layer: int, key_heads: int, grads: tuple[torch.Tensor, ...]) -> None:
    """Add the sums of `add_grads` to dk and dv of the layer's own attention, which may have one per query head."""
    for grad, total in zip(grads[1:], ctx.shared_grads.pop(layer), strict=True):
        place = grad if grad.shape[1] == key_heads else grad.unflatten(1, (key_heads, -1))[:, :, 0]
        place.add_(total)
