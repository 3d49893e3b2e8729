"""Products by group, for a mixture of experts. x [S, in] has the rows of each expert together, `starts` says where they
begin, weight is [E, out, in] with any strides. Shapes never depend on how many rows an expert got: on a GPU the counts
stay on the device, so a step can be captured."""

from __future__ import annotations

import torch

from graftune import spans
from graftune.kernels import launch
from graftune.kernels.experts import reference
from graftune.kernels.experts.reference import Starts

__all__ = ["Starts", "add_multiplied_", "add_products_", "multiply"]


@launch.operation(spans.PRODUCT)
def multiply(x: torch.Tensor, weight: torch.Tensor, starts: Starts, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y [S, out]: each row times the weight of its expert, plus the expert's bias [E, out] (fp32)."""
    assert x.dim() == 2 and weight.shape[2] == x.shape[1] and len(starts.at) == len(weight) + 1
    assert bias is None or (bias.shape == weight.shape[:2] and bias.stride(1) == 1)
    return launch.implementation(reference, x).multiply(x, weight, starts, bias)


@launch.operation("adapters")
def add_multiplied_(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, starts: Starts, scale: float) -> None:
    """y += scale * the same."""
    assert y.shape == (len(x), weight.shape[1]) and weight.shape[2] == x.shape[1] and len(starts.at) == len(weight) + 1
    launch.implementation(reference, x).add_multiplied_(y, x, weight, starts, scale)


@launch.operation("weight gradients")
def add_products_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, starts: Starts, scale: float = 1.0) -> None:
    """total [E, M, N] (fp32) += scale * a_e' b_e, a [S, M] and b [S, N]."""
    assert total.shape == (len(starts.at) - 1, a.shape[1], b.shape[1]) and len(a) == len(b)
    launch.implementation(reference, a).add_products_(total, a, b, starts, scale)
