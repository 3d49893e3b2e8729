"""A projection over an FP8 weight: the kernels before it write the 8-bit codes that its product multiplies.

Quantising x or dY in a pass of its own would read them once more (norms.py, gated.py and rotary.py of kernels/fp8 count
the bytes). So the kernels of norm, SwiGLU and rope also write the codes of their results, and the thin products of the
adapters write their own codes after those. Where the adapters read something else than the weight (dropout, or adapters
off), and for attention's output, codes are made in a pass of their own.

Only this file, frozen/fp8.py and frozen/formats/fp8.py import FP8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graftune.kernels.fp8 import Rows
from graftune.model.context import PassContext
from graftune.model.frozen.fp8 import Fp8
from graftune.model.projection import Normed, Projection, ReadyGrad


@dataclass(frozen=True)
class GradCodes(ReadyGrad):
    """dY times the weight's row scales, as codes, with columns after them for the codes of g."""

    rows: Rows


@dataclass
class Fp8Projection(Projection):
    frozen: Fp8

    def __post_init__(self) -> None:
        super().__post_init__()
        self.frozen.name = self.name
        publish = self.frozen.workspace.publish
        if self.lora is not None and self.adapter_columns and publish not in self.lora.arena.followers:
            self.lora.arena.followers.append(publish)

    def _from_codes(self, ctx: PassContext) -> bool:
        """Whether adapters and weight read the same input, so that x is not needed in bf16."""
        return bool(self.adapter_columns) and ctx.adapted and ctx.dropout is None

    def after_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        ctx: PassContext,
        *,
        wide: bool = False,
        h: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if self._from_codes(ctx):
            return self.frozen.after_norm(x, y, weight, eps)
        return super().after_norm(x, y, weight, eps, ctx, wide=wide, h=h)

    def after_act(
        self, gate_up: torch.Tensor, ctx: PassContext, kind: str = "silu"
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._from_codes(ctx) and kind == "silu":
            return self.frozen.after_act(gate_up)
        return super().after_act(gate_up, ctx, kind)

    def low_after_act(self, gate_up: torch.Tensor, ctx: PassContext, kind: str = "silu") -> torch.Tensor | None:
        if self._from_codes(ctx) and kind == "silu":
            return self.frozen.low_after_act(gate_up)
        return super().low_after_act(gate_up, ctx, kind)

    def act_backward(
        self, grad_act: torch.Tensor, gate_up: torch.Tensor, ctx: PassContext, kind: str = "silu"
    ) -> tuple[torch.Tensor, torch.Tensor, ReadyGrad | None]:
        if not (self._from_codes(ctx) and kind == "silu"):
            return super().act_backward(grad_act, gate_up, ctx, kind)
        grad, act = self._act_buffers(grad_act, gate_up)
        read, out = gate_up[:, : self.width_out], grad[:, : self.width_out]
        return grad, act, GradCodes(self.frozen.act_backward(grad_act, read, out, act))

    def norm_backward(
        self,
        grad_y: torch.Tensor,
        x: torch.Tensor,
        normed: Normed,
        residual: torch.Tensor,
        out: torch.Tensor,
        ctx: PassContext,
    ) -> ReadyGrad | None:
        if not self._from_codes(ctx):
            return super().norm_backward(grad_y, x, normed, residual, out, ctx)
        return GradCodes(self.frozen.norm_backward(grad_y, x, *normed, residual, out[:, : self.width_out]))

    def rope_backward(
        self,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        heads: tuple[int, int, int],
        ctx: PassContext,
    ) -> ReadyGrad | None:
        if not self._from_codes(ctx):
            return super().rope_backward(grads, out, tables, heads, ctx)
        return GradCodes(self.frozen.rope_backward(grads, out[:, : self.width_out], *tables, heads))

    def forward(
        self, x: torch.Tensor, ctx: PassContext, *, wide: bool = False, h: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`wide` is ignored: the adapter columns that the gradient needs are those of its codes."""
        if self._from_codes(ctx):
            return self.frozen.forward(x[:, : self.width_in])
        return super().forward(x, ctx, h=h)

    def backward(
        self,
        grad: torch.Tensor,
        h: torch.Tensor | None,
        ctx: PassContext,
        need_input: bool = True,
        ready: ReadyGrad | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.lora is None or h is None or not need_input or not self._from_codes(ctx):
            return super().backward(grad, h, ctx, need_input)
        assert ready is None or isinstance(ready, GradCodes)
        grad_y, low = grad[:, : self.width_out], self.lora.low(h)
        grad_up = self._grad_up_with_g(grad_y, low, ctx)
        return self.frozen.backward(grad_y, low, rows=ready.rows if ready else None, grad_up=grad_up)
