"""Products by group: the rows of x belong to experts, those of one lie together, and each expert has its own weight.

y[a:b] = x[a:b] W_e' + b_e    (a, b) = starts[e], starts[e + 1]
total_e += scale * a[a:b]' b[a:b]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from graftune.kernels.lora_linear.reference import add_product_


class Starts(NamedTuple):
    """Where each expert's rows begin; one more entry says where the last's end."""

    at: torch.Tensor  # [E + 1] int32
    host: tuple[int, ...] | None  # the same in Python, on devices that are asked for values without a wait

    def groups(self) -> Iterator[tuple[int, slice]]:
        """(expert, its rows), for those that have any."""
        assert self.host is not None, "a GPU's step reads no value of the device"
        for expert, (start, stop) in enumerate(zip(self.host, self.host[1:], strict=False)):
            if stop > start:
                yield expert, slice(start, stop)


def multiply(x: torch.Tensor, weight: torch.Tensor, starts: Starts, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.new_empty(len(x), weight.shape[1])
    for expert, rows in starts.groups():
        torch.mm(x[rows], weight[expert].t(), out=out[rows])
        if bias is not None:
            out[rows] += bias[expert]
    return out


def add_multiplied_(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, starts: Starts, scale: float) -> None:
    for expert, rows in starts.groups():
        y[rows].addmm_(x[rows], weight[expert].t(), alpha=scale)


def add_products_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, starts: Starts, scale: float) -> None:
    for expert, rows in starts.groups():
        add_product_(total[expert], a[rows].t(), b[rows], scale)
