"""Gemma 4's third branch in its small models: proj(act(gate(x)) * e), with e [T, P] the layer's own input.

The inputs of all layers are computed at the start of a pass (model/layer_inputs.py). P is small, so the gate's product
is saved. The activation is computed as a gated unit, with e in place of the up product.

Legend: T tokens, D width, P width of a layer's input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from graftune.kernels import swiglu
from graftune.model.context import PassContext
from graftune.model.part import Part, PartInput, PartPlacer, PartSpec, SavedInput
from graftune.model.projection import Projection, ReadyGrad

GATE, OUT = "per_layer_input_gate", "per_layer_projection"


@dataclass(frozen=True)
class PerLayerSpec(PartSpec):
    width: int
    inner: int  # P
    activation: str = "gelu"
    module: str = ""  # its projections have no module of their own

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        return {GATE: (self.inner, self.width), OUT: (self.width, self.inner)}

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        return {"gate": (GATE,), "out": (OUT,)}

    def build(self, place: PartPlacer) -> PerLayer:
        return PerLayer(place.layer, place.projection("gate"), place.projection("out"), self.activation)


class PerLayerSaved(NamedTuple):
    gate: torch.Tensor  # [T, P]
    h_gate: torch.Tensor | None
    h_out: torch.Tensor | None


@dataclass
class PerLayer(Part[PerLayerSaved]):
    layer: int
    gate: Projection
    out: Projection
    activation: str

    def forward(self, entry: PartInput, ctx: PassContext) -> tuple[torch.Tensor, PerLayerSaved]:
        gate, h_gate = entry.product(self.gate)
        out, h_out = self.out.after_act(self._both(gate, ctx), ctx, self.activation)
        return out, PerLayerSaved(gate, h_gate, h_out)

    def recompute(self, entry: PartInput, ctx: PassContext) -> PerLayerSaved:
        gate, h_gate = entry.product(self.gate)
        return PerLayerSaved(gate, h_gate, self.out.low_after_act(self._both(gate, ctx), ctx, self.activation))

    def backward(
        self,
        grad: torch.Tensor,
        ready: ReadyGrad | None,
        read: SavedInput,
        saved: PerLayerSaved,
        ctx: PassContext,
        need_input: bool,
    ) -> torch.Tensor | None:
        gate, h_gate, h_out = saved
        grad_act, g = self.out.backward(grad, h_out, ctx, ready=ready)
        assert grad_act is not None
        both = self._both(gate, ctx)
        grads, act = torch.empty_like(both), torch.empty_like(grad_act)
        swiglu.backward(grad_act, both, grads, act, self.activation)
        self.out.accumulate_grad(grad, g, act, ctx)
        ctx.add_layer_input_grad(self.layer, grads[:, gate.shape[1] :])
        grad_gate = self.gate.grad_buffer(gate, len(gate))
        grad_gate[:, : gate.shape[1]].copy_(grads[:, : gate.shape[1]])
        grad_read, g = self.gate.backward(grad_gate, h_gate, ctx, need_input)
        self.gate.accumulate_grad(grad_gate, g, read.x, ctx, read.normed)
        return grad_read

    def _both(self, gate: torch.Tensor, ctx: PassContext) -> torch.Tensor:
        """[gate | e], as a gated unit reads it."""
        return torch.cat((gate, ctx.layer_input(self.layer)), 1)
