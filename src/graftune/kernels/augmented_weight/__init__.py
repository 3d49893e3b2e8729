"""Writes adapters next to and below the frozen weight that they adapt (model/projection.py explains why):

        in   n
    [   W  | sB  ]  out         n adapter columns, for s B
    [   A  |     ]  n           n adapter rows, for A

A resident weight keeps them there from update to update. A weight that is dequantised into a scratch buffer, which all
layers share, needs them written after every dequantisation. That is one small launch, which also writes zeros between
the members' blocks, since another layer's adapters were there before. The forward product reads only s B and the
backward product only A, so each pass writes only the part that it reads.
"""

from __future__ import annotations

import torch

from graftune import spans
from graftune.kernels import launch
from graftune.kernels.augmented_weight import reference
from graftune.kernels.augmented_weight.reference import Adapters

__all__ = ["Adapters", "below", "beside"]


@launch.operation(spans.PRODUCT)
def beside(target: torch.Tensor, adapters: Adapters) -> None:
    """Fill target [out, adapter_columns]: s B of each member in its rows and columns, zero elsewhere."""
    assert target.dtype == adapters.up.dtype and target.shape[1] >= adapters.width and target.stride(1) == 1
    launch.implementation(reference, target).beside(target, adapters)


@launch.operation(spans.PRODUCT)
def below(target: torch.Tensor, adapters: Adapters) -> None:
    """Fill target [adapter_columns, in]: the stacked A's, zero below them."""
    assert target.dtype == adapters.down.dtype and len(target) >= len(adapters.down) and target.stride(1) == 1
    launch.implementation(reference, target).below(target, adapters)
