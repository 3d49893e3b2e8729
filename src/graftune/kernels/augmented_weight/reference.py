"""beside[c, i R + r] = s B_i[c, r] in the rows c of member i, below[i R + r] = A_i[r]; zero elsewhere."""

from __future__ import annotations

from typing import NamedTuple

import torch

from graftune.kernels.lora_linear import members


class Adapters(NamedTuple):
    """A group's adapters in the compute dtype: views of the arena's copy that the update writes."""

    down: torch.Tensor  # [R * members, in]: the A's, stacked
    up: torch.Tensor  # [sum of the members' outs, R]: the B's, stacked
    columns: tuple[tuple[int, int], ...]  # each member's columns of the product, which are rows of the weight
    scale: float

    @property
    def width(self) -> int:
        """The number of columns next to the weight, and of rows below it, that they fill."""
        return len(self.columns) * self.up.shape[1]


def beside(target: torch.Tensor, adapters: Adapters) -> None:
    target.zero_()
    for columns, rows, ranks in members(adapters.columns, adapters.up.shape[1]):
        torch.mul(adapters.up[rows], adapters.scale, out=target[columns, ranks])


def below(target: torch.Tensor, adapters: Adapters) -> None:
    target[: len(adapters.down)].copy_(adapters.down)
    target[len(adapters.down) :].zero_()
