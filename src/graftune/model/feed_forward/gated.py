"""The gated MLP: down(act(gate(x)) * up(x)), gate and up as one product.

The backward keeps that product, the largest saved tensor, and recomputes the activation. Its gradient overwrites it.
Under `selective` the product itself is recomputed.

Legend: T tokens, D width, F feed-forward width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from graftune.model.context import PassContext
from graftune.model.part import FeedForward, FeedForwardSpec, PartInput, PartPlacer, SavedInput
from graftune.model.projection import Projection, ReadyGrad


@dataclass(frozen=True)
class GatedSpec(FeedForwardSpec):
    width: int
    ffn: int
    activation: str = "silu"  # silu | gelu
    module: str = "mlp"
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # two where checkpoints hold gate and up as one

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        *first, down = self.names
        return {name: (2 * self.ffn // len(first), self.width) for name in first} | {down: (self.width, self.ffn)}

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        return {"gate_up": self.names[:-1], "down": self.names[-1:]}

    @property
    def residual_outputs(self) -> tuple[str, ...]:
        return self.names[-1:]

    def build(self, place: PartPlacer) -> GatedMlp:
        return GatedMlp(place.projection("gate_up"), place.projection("down"), self.activation)


class GatedSaved(NamedTuple):
    gate_up: torch.Tensor  # [T, 2F + adapter_columns]; its gradient may take its place
    h_gate_up: torch.Tensor | None
    h_down: torch.Tensor | None


@dataclass
class GatedMlp(FeedForward[GatedSaved]):
    gate_up: Projection
    down: Projection
    activation: str

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.gate_up, self.down

    @property
    def last(self) -> Projection:
        return self.down

    def forward(self, entry: PartInput, ctx: PassContext) -> tuple[torch.Tensor, GatedSaved]:
        gate_up, h_gate_up = entry.product(self.gate_up, wide=True)
        out, h_down = self.down.after_act(gate_up[:, : self.gate_up.width_out], ctx, self.activation)
        return out, GatedSaved(gate_up, h_gate_up, h_down)

    def recompute(self, entry: PartInput, ctx: PassContext) -> GatedSaved:
        gate_up, h_gate_up = entry.product(self.gate_up, wide=True)
        h_down = self.down.low_after_act(gate_up[:, : self.gate_up.width_out], ctx, self.activation)
        return GatedSaved(gate_up, h_gate_up, h_down)

    def drop_recomputable(self, saved: GatedSaved) -> GatedSaved:
        return saved._replace(gate_up=saved.gate_up.new_empty(0))

    def recompute_dropped(self, saved: GatedSaved, read: SavedInput, ctx: PassContext) -> GatedSaved:
        return saved._replace(gate_up=read.part_input(ctx).product(self.gate_up, wide=True, h=saved.h_gate_up)[0])

    def backward(
        self,
        grad: torch.Tensor,
        ready: ReadyGrad | None,
        read: SavedInput,
        saved: GatedSaved,
        ctx: PassContext,
        need_input: bool,
    ) -> torch.Tensor | None:
        gate_up, h_gate_up, h_down = saved
        grad_act, g = self.down.backward(grad, h_down, ctx, ready=ready)
        assert grad_act is not None
        grad_gate_up, act, ready = self.gate_up.act_backward(grad_act, gate_up, ctx, self.activation)
        del grad_act
        self.down.accumulate_grad(grad, g, act, ctx)
        del act
        grad_read, g = self.gate_up.backward(grad_gate_up, h_gate_up, ctx, need_input, ready)
        self.gate_up.accumulate_grad(grad_gate_up, g, read.x, ctx, read.normed)
        return grad_read
