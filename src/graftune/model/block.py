"""One transformer block as two halves, each with its own forward and backward.

A half is the unit of saving: the backward keeps the half's input, its first product (qkv, rotated in place, or gate
and up), the attention's output and the small low-rank products, and recomputes norms and SwiGLU, which cost little.
Adapter gradients go straight into the arena; autograd only carries the residual stream from half to half. Leaving all
of it to autograd would save every intermediate and hand us gradients to copy.

Legend: T tokens, D width, N heads, K key heads, H head width, F feed-forward width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from graftune.kernels import lora_linear, rms_norm, rope, swiglu
from graftune.model.frozen import Frozen
from graftune.model.lora import LoraGroup


@dataclass
class NormWeight:
    """A norm's weight, fp32. When it trains, `value` is a view into the arena and `frozen` what the base had."""

    value: torch.Tensor
    frozen: torch.Tensor
    grad: torch.Tensor | None = None

    def of(self, adapted: bool) -> torch.Tensor:
        return self.value if adapted else self.frozen


@dataclass
class Block:
    index: int
    window: int
    norm_eps: float
    heads: tuple[int, int, int]  # N, K, H
    attention_norm: NormWeight
    mlp_norm: NormWeight
    qkv: Frozen
    o: Frozen
    gate_up: Frozen
    down: Frozen
    qkv_bias: torch.Tensor | None = None
    q_norm: NormWeight | None = None
    k_norm: NormWeight | None = None
    lora: dict[str, LoraGroup] = field(default_factory=dict)


class Attend(Protocol):
    """Attention as the pass wants it: over packed documents when training, over a cache when generating."""

    def forward(
        self, block: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [T, N, H], statistics for the backward)."""
        ...

    def backward(
        self,
        block: Block,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        stats: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class Dropout:
    """Counter-based: the mask is a function of (seed, layer, group), so the backward redraws it instead of saving it,
    and a resumed run draws what the straight one drew."""

    p: float
    seed: int

    def apply(self, x: torch.Tensor, block: Block, group: str) -> torch.Tensor:
        """x with a share p of its values dropped and the rest scaled up; the same mask at every call."""
        generator = torch.Generator(x.device)
        place = block.index * 8 + ("qkv", "o", "gate_up", "down").index(group)
        generator.manual_seed((self.seed * 1_000_003 + place) % 2**63)
        keep = torch.rand(x.shape, generator=generator, device=x.device) >= self.p
        return x * keep * (1.0 / (1.0 - self.p))


@dataclass(frozen=True)
class Pass:
    """What all blocks of one forward share."""

    cos: torch.Tensor
    sin: torch.Tensor
    attend: Attend
    adapted: bool = True
    dropout: Dropout | None = None


def attention_half(block: Block, x: torch.Tensor, run: Pass) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """x [T, D] -> (x + o(attention(qkv(norm(x)))), what the backward needs)."""
    normed = rms_norm.forward(x, block.attention_norm.of(run.adapted), block.norm_eps)
    qkv = block.qkv.matmul(normed)
    if block.qkv_bias is not None:
        qkv += block.qkv_bias
    low_qkv = _adapt(block, "qkv", qkv, normed, run)
    q, k, v, raw = _rotate(block, qkv, run)
    by_head, stats = run.attend.forward(block, q, k, v)
    mixed = by_head.flatten(1)
    out = block.o.matmul(mixed)
    low_o = _adapt(block, "o", out, mixed, run)
    return out.add_(x), (x, qkv, raw, mixed, stats, low_qkv, low_o)


def attention_half_backward(
    block: Block, grad: torch.Tensor, saved: tuple[torch.Tensor, ...], run: Pass, need_input: bool
) -> torch.Tensor | None:
    x, qkv, raw, mixed, stats, low_qkv, low_o = saved
    heads, key_heads, width = block.heads
    grad_mixed = block.o.input_grad(grad)
    _down_backward(block, "o", _adapt_backward(block, "o", grad, low_o, run, grad_mixed), mixed, run)

    q, k, v = qkv.view(len(qkv), -1, width).split([heads, key_heads, key_heads], 1)
    by_head = grad_mixed.view(-1, heads, width)
    grads = run.attend.backward(block, by_head, q, k, v, mixed.view(-1, heads, width), stats)
    grad_qkv = torch.cat([g.flatten(1) for g in grads], 1)
    _unrotate_(block, grad_qkv, raw, run)

    normed = rms_norm.forward(x, block.attention_norm.of(run.adapted), block.norm_eps)
    # In the first block nothing below learns, so the input's gradient is not computed.
    grad_normed = block.qkv.input_grad(grad_qkv) if need_input or block.attention_norm.grad is not None else None
    _down_backward(block, "qkv", _adapt_backward(block, "qkv", grad_qkv, low_qkv, run, grad_normed), normed, run)
    if grad_normed is None:
        return None
    weight = block.attention_norm
    return rms_norm.backward(grad_normed, x, weight.of(run.adapted), block.norm_eps, weight.grad).add_(grad)


def mlp_half(block: Block, x: torch.Tensor, run: Pass) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """x [T, D] -> (x + down(swiglu(gate_up(norm(x)))), what the backward needs)."""
    normed = rms_norm.forward(x, block.mlp_norm.of(run.adapted), block.norm_eps)
    gate_up = block.gate_up.matmul(normed)
    low_gate_up = _adapt(block, "gate_up", gate_up, normed, run)
    act = swiglu.forward(gate_up)
    out = block.down.matmul(act)
    low_down = _adapt(block, "down", out, act, run)
    return out.add_(x), (x, gate_up, low_gate_up, low_down)


def mlp_half_backward(block: Block, grad: torch.Tensor, saved: tuple[torch.Tensor, ...], run: Pass) -> torch.Tensor:
    x, gate_up, low_gate_up, low_down = saved
    grad_act = block.down.input_grad(grad)
    g_down = _adapt_backward(block, "down", grad, low_down, run, grad_act)
    grad_gate_up, act = swiglu.backward(grad_act, gate_up)
    _down_backward(block, "down", g_down, act, run)

    normed = rms_norm.forward(x, block.mlp_norm.of(run.adapted), block.norm_eps)
    grad_normed = block.gate_up.input_grad(grad_gate_up)
    g_gate_up = _adapt_backward(block, "gate_up", grad_gate_up, low_gate_up, run, grad_normed)
    _down_backward(block, "gate_up", g_gate_up, normed, run)
    weight = block.mlp_norm
    return rms_norm.backward(grad_normed, x, weight.of(run.adapted), block.norm_eps, weight.grad).add_(grad)


class AttentionHalf(torch.autograd.Function):
    """Hooks the attention half into autograd. `anchor` makes the first block's output require a gradient although
    its input does not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, block: Block, run: Pass) -> torch.Tensor:
        out, saved = attention_half(block, x, run)
        ctx.save_for_backward(*saved)
        ctx.block, ctx.run = block, run
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        need = ctx.needs_input_grad[0]
        return attention_half_backward(ctx.block, grads[0], ctx.saved_tensors, ctx.run, need), None, None, None


class MlpHalf(torch.autograd.Function):
    """Hooks the MLP half into autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, block: Block, run: Pass) -> torch.Tensor:
        out, saved = mlp_half(block, x, run)
        ctx.save_for_backward(*saved)
        ctx.block, ctx.run = block, run
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return mlp_half_backward(ctx.block, grads[0], ctx.saved_tensors, ctx.run), None, None, None


def _adapt(block: Block, name: str, y: torch.Tensor, x: torch.Tensor, run: Pass) -> torch.Tensor:
    """Adds the group's low-rank product into y; returns x A' for the backward (empty without adapters)."""
    group = block.lora.get(name)
    if group is None or not run.adapted:
        return x.new_empty(0)
    if run.dropout is not None:
        x = run.dropout.apply(x, block, name)
    return lora_linear.forward(y, x, group.down, group.up, group.scale)


def _adapt_backward(
    block: Block, name: str, grad_y: torch.Tensor, low: torch.Tensor, run: Pass, grad_x: torch.Tensor | None
) -> torch.Tensor | None:
    """Adds the B's gradients into the arena, and the adapters' share of the input's gradient into `grad_x`.
    Returns what `_down_backward` needs for the A's."""
    group = block.lora.get(name)
    if group is None or not run.adapted:
        return None
    g = lora_linear.up_backward(grad_y, low, group.up, group.scale, group.parts)
    if grad_x is not None and run.dropout is None:
        grad_x.addmm_(g, group.down)
    elif grad_x is not None and run.dropout is not None:
        grad_x.add_(run.dropout.apply(g @ group.down, block, name))
    return g


def _down_backward(block: Block, name: str, g: torch.Tensor | None, x: torch.Tensor, run: Pass) -> None:
    if g is not None:
        kept = x if run.dropout is None else run.dropout.apply(x, block, name)
        lora_linear.down_backward(g, kept, block.lora[name].grad_down)


def _rotate(
    block: Block, qkv: torch.Tensor, run: Pass
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norms and rotates the q and k of qkv [T, (N + 2K) H] in place -> views q [T, N, H], k and v [T, K, H], and what
    q and k were before their norm (empty without one: the rotation itself is undone without its input)."""
    heads, key_heads, width = block.heads
    parts = qkv.view(len(qkv), -1, width)
    q, k, v = parts.split([heads, key_heads, key_heads], 1)
    raw = qkv.new_empty(0)
    if block.q_norm is not None and block.k_norm is not None:
        raw = parts[:, : heads + key_heads].clone()
        q.copy_(rms_norm.forward(q, block.q_norm.of(run.adapted), block.norm_eps))
        k.copy_(rms_norm.forward(k, block.k_norm.of(run.adapted), block.norm_eps))
    rope.rotate_(parts[:, : heads + key_heads], run.cos, run.sin)
    return q, k, v, raw


def _unrotate_(block: Block, grad_qkv: torch.Tensor, raw: torch.Tensor, run: Pass) -> None:
    """The way back of `_rotate`, in place on the gradient [T, (N + 2K) H]."""
    heads, key_heads, width = block.heads
    parts = grad_qkv.view(len(grad_qkv), -1, width)
    rope.unrotate_(parts[:, : heads + key_heads], run.cos, run.sin)
    if block.q_norm is not None and block.k_norm is not None:
        for norm, place in ((block.q_norm, slice(0, heads)), (block.k_norm, slice(heads, heads + key_heads))):
            weight = norm.of(run.adapted)
            parts[:, place] = rms_norm.backward(parts[:, place], raw[:, place], weight, block.norm_eps, norm.grad)
