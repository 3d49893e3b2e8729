"""Multiplies by a frozen weight and its adapters: y = x W' + s (x A') B', forward and backward.

The product has two layouts. On a GPU the weight's storage has n adapter columns beside it and as many rows below it,
into which `Arena.publish` copies the adapters after each update,

        in   n
    [   W  | sB  ]  out         forward   y  = [x  | h] [W | sB]'     h = x A'
    [   A  |     ]  n           backward  dX = [dY | g] [W ; A]       g = s dY B

so that the adapters need no separate pass over y or dX: the products only get a few columns deeper. For this, the code
that writes x or dY uses `input_buffer` or `grad_buffer`, which have adapter columns for h and g. (A `wide` y
has them too, so that its gradient can overwrite it.) Elsewhere (on a CPU, for weights still in the file, and in the
backward with dropout) the adapters have a separate product, and buffers have no adapter columns.

Full-parameter training is the same class over a weight that trains: `accumulate_grad` then adds dW instead of dA.

The operations that write x or dY are methods here (`after_norm`, `after_act`, `act_backward`, `norm_backward`,
`rope_backward`), because a projection such as that of fp8_projection.py fuses them with the input of its product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from graftune import spans
from graftune.kernels import launch, lora_linear, rms_norm, rope, swiglu
from graftune.kernels.lora_linear import LowRank
from graftune.model.arena import LoraGroup
from graftune.model.context import PassContext
from graftune.model.frozen import Augmented, Frozen, Trained, row_stride

# From LONG tokens or LARGE values of dY on, g and dB are computed in one pass over dY; below, dB runs beside attention.
LONG, LARGE = 2048, 12_000_000


class Normed(NamedTuple):
    """The input of a projection as the norm before it computed it: x * rstd * weight."""

    rstd: torch.Tensor  # [T] fp32
    weight: torch.Tensor  # [in] fp32

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm.apply(x, self.rstd, self.weight)


class ReadyGrad:
    """A gradient in the form that its projection multiplies, made by the kernel that wrote the gradient buffer. Only
    the projection that made it reads it, in `backward`. Only FP8 makes one (`GradCodes` in fp8_projection.py: dY as
    8-bit codes); every other projection returns None."""


def augmented_buffer(like: torch.Tensor, rows: int, width: int, adapter_columns: int) -> torch.Tensor:
    """A new buffer [rows, width + adapter_columns]. With adapter columns its rows are aligned for the products."""
    storage = torch.empty(rows, row_stride(width, adapter_columns), dtype=like.dtype, device=like.device)
    return storage[:, : width + adapter_columns]


@dataclass
class Projection:
    frozen: Frozen
    lora: LoraGroup | None = None
    mask_id: int = 0  # tells the dropout masks of one step apart
    name: str = "product"  # of the operation, in a profile

    def __post_init__(self) -> None:
        self.width_in, self.width_out = self.frozen.in_features, self.frozen.out_features
        self.adapter_columns = (
            self.frozen.adapter_columns if isinstance(self.frozen, Augmented) and self.lora is not None else 0
        )
        if self.adapter_columns:
            assert self.lora is not None and isinstance(self.frozen, Augmented)
            self.lora.place_adapters(self.frozen)

    def input_buffer(self, like: torch.Tensor, rows: int) -> torch.Tensor:
        """[rows, in + adapter_columns] to write x into."""
        return augmented_buffer(like, rows, self.width_in, self.adapter_columns)

    def grad_buffer(self, like: torch.Tensor, rows: int) -> torch.Tensor:
        """[rows, out + adapter_columns] to write dY into."""
        return augmented_buffer(like, rows, self.width_out, self.adapter_columns)

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
        """(s = x + y, rstd, the product of norm(s), h). y is overwritten by the sum. See `forward`."""
        normed = self.input_buffer(x, len(x))
        x, rstd = rms_norm.add_forward(x, y, weight, eps, normed[:, : self.width_in])
        return x, rstd, *self.forward(normed, ctx, wide=wide, h=h)

    def after_act(
        self, gate_up: torch.Tensor, ctx: PassContext, kind: str = "silu"
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The product of the activated gate_up, and h."""
        act = self.input_buffer(gate_up, len(gate_up))
        swiglu.forward(gate_up, act[:, : self.width_in], kind)
        return self.forward(act, ctx)

    def low_after_act(self, gate_up: torch.Tensor, ctx: PassContext, kind: str = "silu") -> torch.Tensor | None:
        """The h of `after_act` without its product."""
        if self.lora is None or not ctx.adapted:
            return None
        act = augmented_buffer(gate_up, len(gate_up), self.width_in, 0)
        swiglu.forward(gate_up, act, kind)
        return lora_linear.down(self._dropped(act, ctx), self.lora.adapters.down)

    def act_backward(
        self, grad_act: torch.Tensor, gate_up: torch.Tensor, ctx: PassContext, kind: str = "silu"
    ) -> tuple[torch.Tensor, torch.Tensor, ReadyGrad | None]:
        """Runs swiglu.backward; returns the projection's gradient buffer, the activation, `ready` for `backward`."""
        grad, act = self._act_buffers(grad_act, gate_up)
        swiglu.backward(grad_act, gate_up[:, : self.width_out], grad[:, : self.width_out], act, kind)
        return grad, act, None

    def _act_buffers(self, grad_act: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers for `act_backward`'s results. The GPU kernels work value by value, so they overwrite gate_up, a
        `wide` product of this projection, and grad_act."""
        if launch.fused(gate_up):
            return gate_up, grad_act
        return self.grad_buffer(gate_up, len(gate_up)), torch.empty_like(grad_act)

    def norm_backward(
        self,
        grad_y: torch.Tensor,
        x: torch.Tensor,
        normed: Normed,
        residual: torch.Tensor,
        out: torch.Tensor,
        ctx: PassContext,
    ) -> ReadyGrad | None:
        """Runs rms_norm.add_backward into `out`, the projection's gradient buffer, for a norm that is not trained;
        returns `ready` for `backward`."""
        rms_norm.add_backward(grad_y, x, *normed, residual, None, out[:, : self.width_out])
        return None

    def rope_backward(
        self,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        heads: tuple[int, int, int],
        ctx: PassContext,
    ) -> ReadyGrad | None:
        """Runs rope.finish_backward into `out`, the projection's gradient buffer, where q and k have no norm; returns
        `ready` for `backward`."""
        rope.finish_backward(grads, out[:, : self.width_out], *tables, heads, out.new_empty(0))
        return None

    def forward(
        self, x: torch.Tensor, ctx: PassContext, *, wide: bool = False, h: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes y from an input buffer, and h for the backward. With `wide`, y gets the adapter columns that its
        gradient needs later; an `h` from an earlier forward is not computed again."""
        spans.product(self.name)
        plain = x[:, : self.width_in]
        if self.lora is None or not ctx.adapted:
            return self.frozen.matmul(plain), None
        tail = x[:, self.width_in :] if self.adapter_columns else None
        if h is None:
            h = lora_linear.down(self._dropped(plain, ctx), self.lora.adapters.down, tail)
        elif tail is not None:
            tail[:, : h.shape[1]].copy_(h)
            tail[:, h.shape[1] :].zero_()
        if not self.adapter_columns:
            y = self.frozen.matmul(plain)
            return lora_linear.add_(y, self.lora.low(h)), h
        assert isinstance(self.frozen, Augmented)
        if not wide:
            return self.frozen.matmul_augmented(x), h
        y = self.grad_buffer(x, len(x))
        self.frozen.matmul_augmented(x, y[:, : self.width_out])
        return y, h

    def _dropped(self, x: torch.Tensor, ctx: PassContext) -> torch.Tensor:
        """The input of the adapters, after dropout."""
        return x if ctx.dropout is None else ctx.dropout.apply(x, self.mask_id)

    def backward(
        self,
        grad: torch.Tensor,
        h: torch.Tensor | None,
        ctx: PassContext,
        need_input: bool = True,
        ready: ReadyGrad | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Computes dX, if needed, and g for `accumulate_grad` from a gradient buffer; adds dB. `ready`: the result of
        `act_backward`, `norm_backward` or `rope_backward`."""
        spans.product(self.name)
        grad_y, lora = grad[:, : self.width_out], self.lora
        if lora is None or h is None:
            return (self.frozen.input_grad(grad_y) if need_input else None), None
        low, inside = lora.low(h), bool(self.adapter_columns) and ctx.dropout is None and need_input
        tail = grad[:, self.width_out : self.width_out + self.adapter_columns] if inside else None
        grad_up = self._grad_up_with_g(grad_y, low, ctx)
        if grad_up is None:
            g = lora_linear.up_backward(grad_y, low, tail)
        else:
            g = lora_linear.up_both(grad_y, low, grad_up, tail)
        if not need_input:
            return None, g
        if inside:
            assert isinstance(self.frozen, Augmented)
            return self.frozen.input_grad_augmented(grad[:, : self.width_out + self.adapter_columns]), g
        grad_x = self.frozen.input_grad(grad_y)
        if ctx.dropout is None:
            return lora_linear.add_input_grad_(grad_x, g, lora.adapters.down), g
        return grad_x.add_(ctx.dropout.apply(g @ lora.adapters.down, self.mask_id)), g

    def _grad_up_with_g(self, grad_y: torch.Tensor, low: LowRank, ctx: PassContext) -> torch.Tensor | None:
        """The buffer of dB if it is added in the pass over dY that computes g. None: dB is queued, to run beside
        attention."""
        assert self.lora is not None
        grad_up = self.lora.grad_up
        if len(grad_y) >= LONG or grad_y.numel() >= LARGE:
            return grad_up
        product = low.rank > lora_linear.THIN
        ctx.defer(lambda: lora_linear.up_grad(grad_y, low, grad_up), grad_y, low.h, product=product)
        return None

    def reads_input(self, g: torch.Tensor | None) -> bool:
        """Whether `accumulate_grad` reads x."""
        return g is not None or isinstance(self.frozen, Trained)

    def accumulate_grad(
        self,
        grad: torch.Tensor,
        g: torch.Tensor | None,
        x: torch.Tensor,
        ctx: PassContext,
        normed: Normed | None = None,
    ) -> None:
        """Adds dA, or dW where the weight itself trains. x [T, in] is the input, or the input of the norm."""
        if self.reads_input(g):
            whole = grad[:, : self.width_out] if isinstance(self.frozen, Trained) else None  # dA does without it
            reads = [x, *(normed or ()), *(t for t in (whole, g) if t is not None)]
            product = whole is not None or (self.lora is not None and len(self.lora.adapters.down) > lora_linear.THIN)
            ctx.defer(lambda: self._accumulate_grad(whole, g, x, ctx, normed), *reads, product=product)

    def _accumulate_grad(
        self,
        grad: torch.Tensor | None,
        g: torch.Tensor | None,
        x: torch.Tensor,
        ctx: PassContext,
        normed: Normed | None,
    ) -> None:
        if isinstance(self.frozen, Trained) and grad is not None:
            self.frozen.accumulate_grad(grad, x if normed is None else normed.of(x))
        if g is None or self.lora is None:
            return
        if ctx.dropout is not None:
            read = self._dropped(x if normed is None else normed.of(x), ctx)
            lora_linear.down_backward(g, read, self.lora.grad_down)
        else:
            rstd, weight = normed or (None, None)
            lora_linear.down_backward(g, x, self.lora.grad_down, rstd=rstd, weight=weight)
