"""One transformer block as two halves, each with its own forward and backward.

A half is the unit of saving: the backward keeps the half's input, its first product (qkv, rotated in place, or gate
and up), the attention's output and the small low-rank products, and recomputes norms and SwiGLU, which cost little.
Adapter gradients go straight into the arena. The residual add is left to the norm that reads the sum, which makes it
one pass less: a half takes the stream x and what is still to be added to it, y, and hands both on.

Legend: T tokens, D width, N heads, K key heads, H head width, F feed-forward width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from graftune.kernels import rms_norm, rope, swiglu
from graftune.model.projection import Normed, Projection, with_room
from graftune.model.run import Pass


@dataclass
class NormWeight:
    """A norm's weight, fp32. When it trains, `value` is a view into the arena and `frozen` what the base had."""

    value: torch.Tensor
    frozen: torch.Tensor
    grad: torch.Tensor | None = None

    def of(self, adapted: bool) -> torch.Tensor:
        return self.value if adapted else self.frozen


@dataclass
class Bias:
    """The bias of q, k and v together, in the compute dtype."""

    value: torch.Tensor
    grad: torch.Tensor | None = None


@dataclass
class Block:
    index: int
    window: int
    norm_eps: float
    heads: tuple[int, int, int]  # N, K, H
    attention_norm: NormWeight
    mlp_norm: NormWeight
    qkv: Projection
    o: Projection
    gate_up: Projection
    down: Projection
    qkv_bias: Bias | None = None
    q_norm: NormWeight | None = None
    k_norm: NormWeight | None = None

    @property
    def projections(self) -> tuple[Projection, Projection, Projection, Projection]:
        return self.qkv, self.o, self.gate_up, self.down


class Attended(NamedTuple):
    """What the attention half keeps."""

    x: torch.Tensor  # [T, D]
    rstd: torch.Tensor  # [T] fp32
    qkv: torch.Tensor  # [T, (N + 2K) H], rotated
    raw: torch.Tensor  # [T, N + K, H] before q's and k's norm; empty without one
    mixed: torch.Tensor  # [T, N H + room], attention's output
    stats: torch.Tensor
    h_qkv: torch.Tensor | None
    h_o: torch.Tensor | None


class Mlped(NamedTuple):
    """What the MLP half keeps."""

    x: torch.Tensor  # [T, D]
    rstd: torch.Tensor  # [T] fp32
    gate_up: torch.Tensor  # [T, 2F]
    h_gate_up: torch.Tensor | None
    h_down: torch.Tensor | None


def attention_half(
    block: Block, x: torch.Tensor, y: torch.Tensor | None, run: Pass
) -> tuple[torch.Tensor, torch.Tensor, Attended]:
    """(x, y) -> (s = x + y, o(attention(qkv(norm(s)))), what the backward needs)."""
    normed = block.qkv.input_buffer(x, len(x))
    weight = block.attention_norm.of(run.adapted)
    x, rstd = rms_norm.add_forward(x, y, weight, block.norm_eps, normed[:, : x.shape[1]])
    qkv, h_qkv = block.qkv.forward(normed, run)
    del normed
    raw = rope.finish_(
        qkv, run.cos, run.sin, block.heads, bias=block.qkv_bias.value if block.qkv_bias else None,
        q_norm=_weight(block.q_norm, run), k_norm=_weight(block.k_norm, run), eps=block.norm_eps,
    )  # fmt: skip
    mixed = block.o.input_buffer(x, len(x))
    stats = run.attend.forward(block, *_split(block, qkv), _by_head(block, mixed))
    out, h_o = block.o.forward(mixed, run)
    return x, out, Attended(x, rstd, qkv, raw, mixed, stats, h_qkv, h_o)


def attention_half_backward(
    block: Block, grad: torch.Tensor, saved: Attended, run: Pass, need_input: bool
) -> torch.Tensor | None:
    """The stream's gradient in a buffer with room -> the same behind the half."""
    x, rstd, qkv, raw, mixed, stats, h_qkv, h_o = saved
    grad_mixed, g = block.o.backward(grad, h_o, run)
    assert grad_mixed is not None
    block.o.learn(grad, g, mixed[:, : block.o.width_in], run)

    grad_qkv = block.qkv.grad_buffer(x, len(x))
    q, k, v = _split(block, qkv)
    grads = run.attend.grad_buffers(block, q, k) or _split(block, grad_qkv)
    run.flush()
    run.attend.backward(block, _by_head(block, grad_mixed), q, k, v, _by_head(block, mixed), stats, grads)
    del grad_mixed
    rope.finish_backward(
        grads, grad_qkv[:, : block.qkv.width_out], run.cos, run.sin, block.heads, raw,
        q_norm=_weight(block.q_norm, run), k_norm=_weight(block.k_norm, run), eps=block.norm_eps,
        grad_q_norm=block.q_norm.grad if block.q_norm else None,
        grad_k_norm=block.k_norm.grad if block.k_norm else None,
    )  # fmt: skip
    del grads
    if block.qkv_bias is not None and block.qkv_bias.grad is not None:
        block.qkv_bias.grad.add_(grad_qkv[:, : block.qkv.width_out].sum(0, dtype=torch.float32))

    # In the first block nothing below learns, so the input's gradient is not computed.
    norm, weight = block.attention_norm, block.attention_norm.of(run.adapted)
    need_normed = need_input or norm.grad is not None
    grad_normed, g = block.qkv.backward(grad_qkv, h_qkv, run, need_normed)
    block.qkv.learn(grad_qkv, g, x, run, Normed(rstd, weight))
    if grad_normed is not None:
        grad = _through_norm(grad_normed, x, rstd, norm, weight, grad, run)
    run.join()
    return None if grad_normed is None else grad


def mlp_half(
    block: Block, x: torch.Tensor, y: torch.Tensor | None, run: Pass
) -> tuple[torch.Tensor, torch.Tensor, Mlped]:
    """(x, y) -> (s = x + y, down(swiglu(gate_up(norm(s)))), what the backward needs)."""
    normed = block.gate_up.input_buffer(x, len(x))
    weight = block.mlp_norm.of(run.adapted)
    x, rstd = rms_norm.add_forward(x, y, weight, block.norm_eps, normed[:, : x.shape[1]])
    gate_up, h_gate_up = block.gate_up.forward(normed, run)
    del normed
    act = block.down.input_buffer(x, len(x))
    swiglu.forward(gate_up, act[:, : block.down.width_in])
    out, h_down = block.down.forward(act, run)
    return x, out, Mlped(x, rstd, gate_up, h_gate_up, h_down)


def gate_up_again(block: Block, saved: Mlped, run: Pass) -> Mlped:
    """Fills in the gate_up product that was not kept."""
    normed = block.gate_up.input_buffer(saved.x, len(saved.x))
    weight = block.mlp_norm.of(run.adapted)
    rms_norm.add_forward(saved.x, None, weight, block.norm_eps, normed[:, : saved.x.shape[1]])
    return saved._replace(gate_up=block.gate_up.forward(normed, run)[0])


def mlp_half_backward(block: Block, grad: torch.Tensor, saved: Mlped, run: Pass) -> torch.Tensor:
    """The stream's gradient in a buffer with room -> the same behind the half."""
    x, rstd, gate_up, h_gate_up, h_down = saved
    grad_act, g = block.down.backward(grad, h_down, run)
    assert grad_act is not None
    grad_gate_up = block.gate_up.grad_buffer(x, len(x))
    act = torch.empty_like(grad_act)
    swiglu.backward(grad_act, gate_up, grad_gate_up[:, : block.gate_up.width_out], act)
    del grad_act
    block.down.learn(grad, g, act, run)
    del act

    norm, weight = block.mlp_norm, block.mlp_norm.of(run.adapted)
    grad_normed, g = block.gate_up.backward(grad_gate_up, h_gate_up, run)
    assert grad_normed is not None
    block.gate_up.learn(grad_gate_up, g, x, run, Normed(rstd, weight))
    del grad_gate_up
    return _through_norm(grad_normed, x, rstd, norm, weight, grad, run)


def _through_norm(
    grad_normed: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    norm: NormWeight,
    weight: torch.Tensor,
    grad: torch.Tensor,
    run: Pass,
) -> torch.Tensor:
    """The stream's gradient with what came through the norm: in place, or elsewhere while sums aside read it still."""
    width = x.shape[1]
    after = grad if run.aside is None else with_room(grad, len(grad), width, grad.shape[1] - width)
    rms_norm.add_backward(grad_normed, x, rstd, weight, grad[:, :width], norm.grad, after[:, :width])
    return after


def _split(block: Block, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, (N + 2K) H (+ room)] -> q [T, N, H], k and v [T, K, H], all views."""
    heads, key_heads, width = block.heads
    parts = qkv[:, : block.qkv.width_out].unflatten(1, (-1, width))
    q, k, v = parts.split([heads, key_heads, key_heads], 1)
    return q, k, v


def _by_head(block: Block, mixed: torch.Tensor) -> torch.Tensor:
    """[T, N H (+ room)] -> [T, N, H], a view."""
    return mixed[:, : block.o.width_in].unflatten(1, (-1, block.heads[2]))


def _weight(norm: NormWeight | None, run: Pass) -> torch.Tensor | None:
    return None if norm is None else norm.of(run.adapted)
