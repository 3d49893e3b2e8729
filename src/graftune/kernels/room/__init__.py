"""Adapters into the room beside and below a weight (model/projection.py says what for):

        in   room
    [   W  |  sB  ]  out
    [   A  |      ]  room

A weight that is resident keeps them there from update to update. One that is dequantised into a scratch, which all
layers share, needs them placed behind every dequantisation: one small launch, which also writes the zeros between the
members' blocks, since what lies in the room belongs to another layer. The other side of the room is not touched: a
product forward reads sB alone, one backward A alone.
"""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.room import reference
from graftune.kernels.room.reference import Adapters

__all__ = ["Adapters", "below", "beside"]


def beside(target: torch.Tensor, adapters: Adapters) -> None:
    """Writes all of target [out, room]: s B of each member in its rows and ranks, zero elsewhere."""
    assert target.dtype == adapters.up.dtype and target.shape[1] >= adapters.width and target.stride(1) == 1
    if launch.fused(target):
        from graftune.kernels.room import kernel

        kernel.beside(target, adapters)
    else:
        reference.beside(target, adapters)


def below(target: torch.Tensor, adapters: Adapters) -> None:
    """Writes all of target [room, in]: the stacked A's, and zero below them."""
    assert target.dtype == adapters.down.dtype and len(target) >= len(adapters.down) and target.stride(1) == 1
    if launch.fused(target):
        from graftune.kernels.room import kernel

        kernel.below(target, adapters)
    else:
        reference.below(target, adapters)
