"""Inputs of the layers that are computed from the tokens alone, all at once at the start of a pass: Gemma 4's per-layer
embeddings.

    e = (norm(x W' / sqrt(D)) + sqrt(P) table[tokens]) / sqrt(2)      x: the embeddings of the tokens

A layer reads its own P columns of e. (The norm is over these; multiplying its epsilon by D replaces the division by
sqrt(D).) Table, projection and norm are frozen where adapters train, and e then needs no gradient; where every weight
trains, the gradients of all layers' inputs are collected and passed on after the backward of all blocks.

Legend: T tokens, D width, L layers, P width of a layer's input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from graftune.kernels import rms_norm
from graftune.model.frozen import Frozen, Trained
from graftune.model.part import NormWeight

TABLE, PROJECTION, NORM = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"


@dataclass(frozen=True)
class LayerInputSpec:
    vocab: int
    layers: int  # of the whole model, also where a plan makes a model of some of its layers
    inner: int  # P
    width: int  # D
    eps: float

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        columns = self.layers * self.inner
        return {
            f"{TABLE}.weight": (self.vocab, columns),
            f"{PROJECTION}.weight": (columns, self.width),
            f"{NORM}.weight": (self.inner,),
        }

    @property
    def table_values(self) -> int:
        return math.prod(self.tensors[f"{TABLE}.weight"])

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.values() if len(shape) > 1)


@dataclass
class LayerInputMaker:
    spec: LayerInputSpec
    table: Frozen
    projection: Frozen
    norm: NormWeight

    def __call__(self, tokens: torch.Tensor, x: torch.Tensor) -> LayerInputs:
        """Tokens [T] and their embeddings [T, D] -> the inputs of all layers."""
        spec = self.spec
        projected = self.projection.matmul(x)
        made = torch.empty_like(projected)
        by_layer = projected.view(-1, spec.inner)
        eps = spec.eps * spec.width
        _, rstd = rms_norm.add_forward(by_layer, None, self.norm.value, eps, made.view(-1, spec.inner))
        made.add_(self.table.rows(tokens), alpha=math.sqrt(spec.inner)).mul_(2**-0.5)
        return LayerInputs(self, made, (tokens, x, projected, rstd) if self._trains else None)

    @property
    def _trains(self) -> bool:
        return isinstance(self.table, Trained)

    def backward(self, grad: torch.Tensor, read: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The gradient of the inputs [T, L P] -> the gradient of x; adds the gradients of the weights."""
        tokens, x, projected, rstd = read
        assert isinstance(self.table, Trained) and isinstance(self.projection, Trained)
        grad = grad.mul_(2**-0.5)
        self.table.accumulate_row_grads(tokens, grad * math.sqrt(self.spec.inner))
        by_layer = grad.view(-1, self.spec.inner)
        read_by_norm = projected.view(-1, self.spec.inner)
        rms_norm.add_backward(by_layer, read_by_norm, rstd, self.norm.value, None, self.norm.grad, by_layer)
        self.projection.accumulate_grad(grad, x)
        return self.projection.input_grad(grad)


class LayerInputs:
    """The inputs of all layers in one pass, and where every weight trains their gradients."""

    def __init__(self, maker: LayerInputMaker, made: torch.Tensor, read: tuple[torch.Tensor, ...] | None):
        self.maker, self.made, self.read = maker, made, read  # made: [T, L P]
        self.grad = None if read is None else torch.zeros_like(made)

    def of(self, layer: int) -> torch.Tensor:
        """[T, P]."""
        return self.made[:, self._columns(layer)]

    def add_grad(self, layer: int, grad: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Add the gradient of `of(layer)`, of all rows [T, P] or of the given ones [R, P]. Frozen inputs ignore it."""
        if self.grad is None:
            return
        place = self.grad[:, self._columns(layer)]
        if rows is None:
            place.add_(grad)
        else:
            place.index_add_(0, rows, grad)

    def backward(self) -> torch.Tensor | None:
        """The gradient of the embeddings, after the backward of all layers; None: they do not train."""
        if self.grad is None or self.read is None:
            return None
        return self.maker.backward(self.grad, self.read)

    def _columns(self, layer: int) -> slice:
        return slice(layer * self.maker.spec.inner, (layer + 1) * self.maker.spec.inner)
