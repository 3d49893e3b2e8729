"""Products by group: rows are sorted by expert, and each expert has its own weight.

y[a:b] = x[rows[a:b]] W_e' + b_e + scale * low[a:b] B_e'     (a, b) = starts[e], starts[e + 1]
total_e += scale * a[a:b]' b[a:b]
out[t] = sum over j of w[t, j] y[places[t, j]]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from graftune.kernels.lora_linear.reference import add_product_


class Starts(NamedTuple):
    """Where each expert's rows begin, and as a last entry where the last expert's rows end."""

    at: torch.Tensor  # [E + 1] int32
    host: tuple[int, ...] | None  # the same in Python, on a CPU; None on a GPU, where reading it would wait

    def groups(self) -> Iterator[tuple[int, slice]]:
        """(expert, its rows), for those that have any."""
        assert self.host is not None, "a GPU's step reads no value of the device"
        for expert, (start, stop) in enumerate(zip(self.host, self.host[1:], strict=False)):
            if stop > start:
                yield expert, slice(start, stop)


class Terms(NamedTuple):
    """What a grouped product computes besides x W'."""

    rows: torch.Tensor | None = None  # [S]: the row of x that each sorted row reads; None: x is sorted itself
    bias: torch.Tensor | None = None  # [E, out] fp32
    low: torch.Tensor | None = None  # [S, R], to be multiplied by `up` and `scale`
    up: torch.Tensor | None = None  # [E, out, R]
    scale: float = 1.0


def multiply(x: torch.Tensor, weight: torch.Tensor, starts: Starts, terms: Terms) -> torch.Tensor:
    x = gathered(x, terms.rows)
    out = x.new_empty(len(x), weight.shape[1])
    for expert, rows in starts.groups():
        torch.mm(x[rows], weight[expert].t(), out=out[rows])
    add_terms_(out, starts, terms)
    return out


def add_terms_(y: torch.Tensor, starts: Starts, terms: Terms) -> None:
    for expert, rows in starts.groups():
        if terms.bias is not None:
            y[rows] += terms.bias[expert]
        if terms.low is not None and terms.up is not None:
            y[rows].addmm_(terms.low[rows], terms.up[expert].t(), alpha=terms.scale)


def add_products_(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, starts: Starts, scale: float,
    a_rows: torch.Tensor | None, b_rows: torch.Tensor | None,
) -> None:  # fmt: skip
    a, b = gathered(a, a_rows), gathered(b, b_rows)
    for expert, rows in starts.groups():
        add_product_(total[expert], a[rows].t(), b[rows], scale)


def combine(y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    chosen = y.index_select(0, places.flatten()).view(*places.shape, -1)
    return chosen.sum(1) if weights is None else torch.einsum("tk,tkd->td", weights.to(y.dtype), chosen)


def gathered(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x.index_select(0, rows)
