"""The gated MLP: down(act(gate(x)) * up(x)), gate and up as one product.

The forward saves that product, the largest saved tensor; the backward recomputes the activation and overwrites the
product with its gradient. Under `selective` the product itself is recomputed.

A shared expert beside a mixture may have a gate of one value for each token, sigmoid(n . w), on its output (n: the
normed stream). As in experts.py, the output is not saved for it: <dy, act W'> = <dy W, act>, so the backward goes
through `down` before it applies the gate.

Legend: T tokens, D width, F feed-forward width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from graftune.model.context import PassContext
from graftune.model.part import FeedForward, FeedForwardSpec, PartInput, PartPlacer, SavedInput
from graftune.model.projection import Projection, ReadyGrad

OUT_GATE = "gate.weight"


@dataclass(frozen=True)
class GatedSpec(FeedForwardSpec):
    width: int
    ffn: int
    activation: str = "silu"  # silu | gelu
    module: str = "mlp"
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # two where checkpoints hold gate and up as one
    out_gate: bool = False  # a frozen gate of one value for each token on the output

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        *first, down = self.names
        return {name: (2 * self.ffn // len(first), self.width) for name in first} | {down: (self.width, self.ffn)}

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        return {"gate_up": self.names[:-1], "down": self.names[-1:]}

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {OUT_GATE: (1, self.width)} if self.out_gate else {}

    def build(self, place: PartPlacer) -> GatedMlp:
        gate = place.tensor(OUT_GATE)[0][0] if self.out_gate else None
        return GatedMlp(place.projection("gate_up"), place.projection("down"), self.activation, gate)


class GatedSaved(NamedTuple):
    gate_up: torch.Tensor  # [T, 2F + adapter_columns]; its gradient may take its place
    h_gate_up: torch.Tensor | None
    h_down: torch.Tensor | None
    gate: torch.Tensor | None = None  # [T, 1] fp32, of the output


@dataclass
class GatedMlp(FeedForward[GatedSaved]):
    gate_up: Projection
    down: Projection
    activation: str
    out_gate: torch.Tensor | None = None  # [D] fp32

    def forward(self, entry: PartInput, ctx: PassContext) -> tuple[torch.Tensor, GatedSaved]:
        gate_up, h_gate_up = entry.product(self.gate_up, wide=True)
        out, h_down = self.down.after_act(gate_up[:, : self.gate_up.width_out], ctx, self.activation)
        gate = self._gate(entry)
        return out if gate is None else out.mul_(gate), GatedSaved(gate_up, h_gate_up, h_down, gate)

    def recompute(self, entry: PartInput, ctx: PassContext) -> GatedSaved:
        gate_up, h_gate_up = entry.product(self.gate_up, wide=True)
        h_down = self.down.low_after_act(gate_up[:, : self.gate_up.width_out], ctx, self.activation)
        return GatedSaved(gate_up, h_gate_up, h_down, self._gate(entry))

    def _gate(self, entry: PartInput) -> torch.Tensor | None:
        """The output's gate [T, 1]. Called after `entry.product`, which leaves the stream and its rstd in `entry`."""
        if self.out_gate is None:
            return None
        weight = self.out_gate if entry.weight is None else self.out_gate * entry.weight
        logits = (entry.x @ weight.to(entry.x.dtype).unsqueeze(1)).float()
        return torch.sigmoid(logits if entry.weight is None else logits * entry.rstd.unsqueeze(1))

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
        gate_up, h_gate_up, h_down, gate = saved
        factor = None if gate is None else gate.to(grad.dtype)
        grad_act, g = self.down.backward(grad, _times(h_down, factor), ctx, ready=ready)
        assert grad_act is not None
        before_unit = grad_act if factor is None else grad_act * factor
        grad_gate_up, act, ready = self.gate_up.act_backward(before_unit, gate_up, ctx, self.activation)
        del before_unit
        grad_logits = None
        if gate is not None:
            grad_logits = (grad_act * act).sum(1, keepdim=True, dtype=torch.float32) * gate * (1 - gate)
        del grad_act
        self.down.accumulate_grad(grad, _times(g, factor), act, ctx)
        del act
        grad_read, g = self.gate_up.backward(grad_gate_up, h_gate_up, ctx, need_input, ready)
        self.gate_up.accumulate_grad(grad_gate_up, g, read.x, ctx, read.normed)
        if grad_read is None or grad_logits is None or self.out_gate is None:
            return grad_read
        return grad_read.add_((grad_logits * self.out_gate).to(grad_read.dtype))


def _times(x: torch.Tensor | None, factor: torch.Tensor | None) -> torch.Tensor | None:
    return x if x is None or factor is None else x * factor
