"""Products by group, for a mixture of experts. S sorted rows have those of each expert together, `starts` says where
they begin, weight is [E, out, in] with any strides. Shapes never depend on how many rows an expert got: on a GPU the
counts stay on the device, so a step can be captured. Experts without rows are not read."""

from __future__ import annotations

import torch

from graftune import spans
from graftune.kernels import launch
from graftune.kernels.experts import reference
from graftune.kernels.experts.reference import Starts, Terms

__all__ = ["Starts", "Terms", "add_products_", "combine", "multiply"]

NOTHING = Terms()


@launch.operation(spans.PRODUCT)
def multiply(x: torch.Tensor, weight: torch.Tensor, starts: Starts, terms: Terms = NOTHING) -> torch.Tensor:
    """y [S, out]: each row times the weight of its expert, with the other terms in the same launch."""
    rows, bias, low, up, _ = terms
    count = len(x) if rows is None else len(rows)
    assert x.dim() == 2 and weight.shape[2] == x.shape[1] and len(starts.at) == len(weight) + 1
    assert bias is None or (bias.shape == weight.shape[:2] and bias.stride(1) == 1)
    assert (low is None) == (up is None)
    assert low is None or up is None or (len(low) == count and up.shape == (*weight.shape[:2], low.shape[1]))
    return launch.implementation(reference, x).multiply(x, weight, starts, terms)


@launch.operation("weight gradients")
def add_products_(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, starts: Starts, scale: float = 1.0,
    a_rows: torch.Tensor | None = None, b_rows: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """total [E, M, N] (fp32) += scale * a_e' b_e, a [S, M] and b [S, N]. Where a or b is not sorted itself, `a_rows` or
    `b_rows` [S] gives the row of a or b for each sorted row."""
    assert total.shape == (len(starts.at) - 1, a.shape[1], b.shape[1])
    assert len(a if a_rows is None else a_rows) == len(b if b_rows is None else b_rows)
    launch.implementation(reference, a).add_products_(total, a, b, starts, scale, a_rows, b_rows)


@launch.operation("sum of experts")
def combine(y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """[S, D] -> [T, D]: each token's rows `places` [T, k], weighed [T, k] and added in the order of its choices."""
    assert weights is None or weights.shape == places.shape
    return launch.implementation(reference, y).combine(y, places, weights)
