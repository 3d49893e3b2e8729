"""The same projection of every expert: frozen weights and an adapter each, as grouped products over sorted rows.

Legend: E experts, S rows, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from graftune import spans
from graftune.kernels import experts as grouped
from graftune.kernels.experts import Starts
from graftune.model.frozen import Augmented, Frozen


class ExpertWeights(Protocol):
    """The frozen weights of all experts, [E, out, in] if one could see them so."""

    kind: str
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int: ...
    def matmul(self, x: torch.Tensor, starts: Starts, bias: torch.Tensor | None) -> torch.Tensor:
        """x [S, in] -> [S, out], a fresh tensor. `bias` [E, out] is added."""
        ...

    def input_grad(self, grad: torch.Tensor, starts: Starts) -> torch.Tensor:
        """grad [S, out] -> [S, in], a fresh tensor."""
        ...


class Several:
    """A weight for each expert; only those with rows are read. For CPUs."""

    def __init__(self, weights: Sequence[Frozen]):
        self.weights, self.kind = list(weights), weights[0].kind
        self.out_features, self.in_features = weights[0].out_features, weights[0].in_features

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def matmul(self, x: torch.Tensor, starts: Starts, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(len(x), self.out_features)
        for expert, rows in starts.groups():
            product = self.weights[expert].matmul(x[rows])
            out[rows] = product if bias is None else product.add_(bias[expert])
        return out

    def input_grad(self, grad: torch.Tensor, starts: Starts) -> torch.Tensor:
        out = grad.new_empty(len(grad), self.in_features)
        for expert, rows in starts.groups():
            out[rows] = self.weights[expert].input_grad(grad[rows])
        return out


class Stacked:
    """All experts' rows concatenated in one weight [E out, in] on a GPU: resident, or dequantised together into
    the scratch for each product (a micro-batch of training reaches nearly all of them)."""

    def __init__(self, weight: Augmented, experts: int):
        self.frozen, self.experts, self.kind = weight, experts, weight.kind
        self.out_features, self.in_features = weight.out_features // experts, weight.in_features

    @property
    def nbytes(self) -> int:
        return self.frozen.nbytes

    def matmul(self, x: torch.Tensor, starts: Starts, bias: torch.Tensor | None) -> torch.Tensor:
        return grouped.multiply(x, self._weight(), starts, bias)

    def input_grad(self, grad: torch.Tensor, starts: Starts) -> torch.Tensor:
        return grouped.multiply(grad, self._weight().transpose(1, 2), starts)

    def _weight(self) -> torch.Tensor:
        return self.frozen.dense().unflatten(0, (self.experts, self.out_features))


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

    def forward(self, x: torch.Tensor, starts: Starts, adapted: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [S, in] -> (y [S, out], h [S, R] for the backward)."""
        spans.product(self.name)
        y = self.weights.matmul(x, starts, self.bias)
        spans.product("adapters")
        h = self.low(x, starts, adapted)
        if self.lora is not None and h is not None:
            grouped.add_multiplied_(y, h, self.lora.up, starts, self.lora.scale)
        return y, h

    def low(self, x: torch.Tensor, starts: Starts, adapted: bool) -> torch.Tensor | None:
        """The h of `forward` without its product."""
        return grouped.multiply(x, self.lora.down, starts) if self.lora is not None and adapted else None

    def backward(
        self, grad: torch.Tensor, h: torch.Tensor | None, starts: Starts
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """dY [S, out] -> (dX [S, in], g = s dY B [S, R] for `accumulate_grad`)."""
        spans.product(self.name)
        grad_x = self.weights.input_grad(grad, starts)
        spans.product("adapters")
        if self.lora is None or h is None:
            return grad_x, None
        g = grouped.multiply(grad, self.lora.up.transpose(1, 2), starts).mul_(self.lora.scale)
        grouped.add_multiplied_(grad_x, g, self.lora.down.transpose(1, 2), starts, 1.0)
        return grad_x, g

    def accumulate_grad(
        self, grad: torch.Tensor, h: torch.Tensor | None, g: torch.Tensor | None, x: torch.Tensor, starts: Starts
    ) -> None:
        """Adds dB = s dY' h and dA = g' x."""
        if self.lora is not None and h is not None and g is not None:
            grouped.add_products_(self.lora.grad_up, grad, h, starts, self.lora.scale)
            grouped.add_products_(self.lora.grad_down, g, x, starts)
