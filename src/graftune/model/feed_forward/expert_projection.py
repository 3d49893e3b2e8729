"""One projection of all experts: frozen weights and an adapter each, as grouped products over sorted rows.

Where a kernel computes, x need not be sorted: `rows` [S] gives the row of x that each sorted row reads.

Legend: E experts, S rows, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graftune import spans
from graftune.kernels import experts as grouped
from graftune.kernels.experts import Starts, Terms
from graftune.kernels.experts.reference import add_terms_
from graftune.model.frozen import Augmented, Frozen


class PerExpert:
    """The frozen weights of all experts, one for each; only those with rows are read. For CPUs."""

    def __init__(self, weights: Sequence[Frozen]):
        self.weights, self.kind = list(weights), weights[0].kind
        self.out_features, self.in_features = weights[0].out_features, weights[0].in_features

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def matmul(self, x: torch.Tensor, starts: Starts, terms: Terms) -> torch.Tensor:
        """x [S, in] -> [S, out], a fresh tensor, with the terms added."""
        out = x.new_empty(len(x), self.out_features)
        for expert, rows in starts.groups():
            out[rows] = self.weights[expert].matmul(x[rows])
        add_terms_(out, starts, terms)
        return out

    def input_grad(self, grad: torch.Tensor, starts: Starts, terms: Terms) -> torch.Tensor:
        """grad [S, out] -> [S, in], a fresh tensor, with the terms added."""
        out = grad.new_empty(len(grad), self.in_features)
        for expert, rows in starts.groups():
            out[rows] = self.weights[expert].input_grad(grad[rows])
        add_terms_(out, starts, terms)
        return out


class Stacked:
    """All experts' rows concatenated in one weight [E out, in] on a GPU: resident, or dequantised into the scratch for
    each product, without the experts that have no rows."""

    def __init__(self, weight: Augmented, experts: int):
        self.frozen, self.experts, self.kind = weight, experts, weight.kind
        self.out_features, self.in_features = weight.out_features // experts, weight.in_features

    @property
    def nbytes(self) -> int:
        return self.frozen.nbytes

    def matmul(self, x: torch.Tensor, starts: Starts, terms: Terms) -> torch.Tensor:
        return grouped.multiply(x, self._weight(starts), starts, terms)

    def input_grad(self, grad: torch.Tensor, starts: Starts, terms: Terms) -> torch.Tensor:
        return grouped.multiply(grad, self._weight(starts).transpose(1, 2), starts, terms)

    def _weight(self, starts: Starts) -> torch.Tensor:
        return self.frozen.dense(starts.at).unflatten(0, (self.experts, self.out_features))


ExpertWeights = PerExpert | Stacked


@dataclass(frozen=True)
class ExpertLora:
    """An adapter for each expert, as views into the arena."""

    down: torch.Tensor  # [E, R, in], compute dtype
    up: torch.Tensor  # [E, out, R], compute dtype
    grad_down: torch.Tensor  # fp32
    grad_up: torch.Tensor  # fp32
    scale: float


@dataclass
class ExpertProjection:
    """y = x W_e' + b_e + s (x A_e') B_e' for the rows of each expert e."""

    weights: ExpertWeights
    lora: ExpertLora | None = None
    name: str = "product"  # of the operation, in a profile
    bias: torch.Tensor | None = None  # [E, out] fp32, frozen

    def forward(
        self, x: torch.Tensor, starts: Starts, adapted: bool, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [S, in] -> (y [S, out], h [S, R] for the backward)."""
        spans.product("adapters")
        h = self.low(x, starts, adapted, rows)
        terms = Terms(rows, self.bias)
        if self.lora is not None and h is not None:
            terms = terms._replace(low=h, up=self.lora.up, scale=self.lora.scale)
        spans.product(self.name)
        return self.weights.matmul(x, starts, terms), h

    def low(
        self, x: torch.Tensor, starts: Starts, adapted: bool, rows: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The h of `forward` without its product."""
        if self.lora is None or not adapted:
            return None
        return grouped.multiply(x, self.lora.down, starts, Terms(rows))

    def backward(
        self, grad: torch.Tensor, h: torch.Tensor | None, starts: Starts, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """dY [S, out] -> (dX [S, in], g = s dY B [S, R] for `accumulate_grad`)."""
        terms, g = Terms(rows), None
        if self.lora is not None and h is not None:
            spans.product("adapters")
            g = grouped.multiply(grad, self.lora.up.transpose(1, 2), starts, terms).mul_(self.lora.scale)
            terms = terms._replace(low=g, up=self.lora.down.transpose(1, 2))
        spans.product(self.name)
        return self.weights.input_grad(grad, starts, terms), g

    def accumulate_grad(
        self, grad: torch.Tensor, h: torch.Tensor | None, g: torch.Tensor | None, x: torch.Tensor, starts: Starts,
        grad_rows: torch.Tensor | None = None, x_rows: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Adds dB = s dY' h and dA = g' x."""
        if self.lora is not None and h is not None and g is not None:
            grouped.add_products_(self.lora.grad_up, grad, h, starts, self.lora.scale, a_rows=grad_rows)
            grouped.add_products_(self.lora.grad_down, g, x, starts, b_rows=x_rows)
