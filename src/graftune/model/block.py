"""One transformer block as two halves, each with its own forward and backward.

A half is the unit of saving: the backward keeps the half's input, its first product (qkv, rotated in place, or gate
and up), the attention's output and the small low-rank products, and recomputes norms and gated units, which cost
little. Adapter gradients go straight into the arena. The residual add is left to the norm that reads the sum, which
makes it one pass less: a half takes the stream x and what is still to be added to it, y, and hands both on.

Every family goes through here. Norms lie before a half, behind it or both; what a half says may be scaled on its way to
the stream: `_enter` and `_leave` are the two doors, and where a family has nothing there, nothing is done.

Legend: T tokens, D width, N heads, K key heads, H head width, F feed-forward width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from graftune.kernels import rms_norm, rope
from graftune.kernels.fp8 import Rows
from graftune.model.projection import Normed, Projection, with_room
from graftune.model.run import Pass

if TYPE_CHECKING:
    from graftune.model.experts import Experts, Routed


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
    attention_norm: NormWeight | None  # before the half; None: it reads the stream as it is
    mlp_norm: NormWeight | None
    qkv: Projection
    o: Projection
    gate_up: Projection | None  # of a plain MLP; None where there are experts
    down: Projection | None
    qkv_bias: Bias | None = None
    q_norm: NormWeight | None = None
    k_norm: NormWeight | None = None
    attention_out_norm: NormWeight | None = None  # behind the half, before the residual add
    mlp_out_norm: NormWeight | None = None
    rope: int = 0  # which of the pass's rotary tables
    score_scale: float = 0.0
    score_cap: float = 0.0
    residual_scale: float = 1.0
    activation: str = "silu"
    experts: Experts | None = None

    @property
    def projections(self) -> tuple[Projection, ...]:
        return tuple(p for p in (self.qkv, self.o, self.gate_up, self.down) if p is not None)

    @property
    def plain_mlp(self) -> tuple[Projection, Projection]:
        assert self.gate_up is not None and self.down is not None
        return self.gate_up, self.down


class Attended(NamedTuple):
    """What the attention half keeps."""

    x: torch.Tensor  # [T, D]
    rstd: torch.Tensor  # [T] fp32, empty without a norm before
    qkv: torch.Tensor  # [T, (N + 2K) H], rotated
    raw: torch.Tensor  # [T, N + K, H] before q's and k's norm; empty without one
    mixed: torch.Tensor  # [T, N H + room], attention's output
    stats: torch.Tensor
    h_qkv: torch.Tensor | None
    h_o: torch.Tensor | None
    left: Left


class Mlped(NamedTuple):
    """What the MLP half keeps."""

    x: torch.Tensor  # [T, D]
    rstd: torch.Tensor  # [T] fp32, empty without a norm before
    gate_up: torch.Tensor  # [T, 2F + room]; its gradient may take its place
    h_gate_up: torch.Tensor | None
    h_down: torch.Tensor | None
    left: Left
    routed: Routed | None = None  # of experts: who went where


class Left(NamedTuple):
    """What the norm behind a half read, and its rstd; None without one."""

    out: torch.Tensor | None  # [T, D]
    rstd: torch.Tensor | None  # [T] fp32


def attention_half(
    block: Block, x: torch.Tensor, y: torch.Tensor | None, run: Pass
) -> tuple[torch.Tensor, torch.Tensor, Attended]:
    """(x, y) -> (s = x + y, o(attention(qkv(norm(s)))), what the backward needs)."""
    x, rstd, qkv, h_qkv = _enter(block, block.qkv, block.attention_norm, x, y, run)
    raw = rope.finish_(
        qkv, *run.tables[block.rope], block.heads, bias=block.qkv_bias.value if block.qkv_bias else None,
        q_norm=_weight(block.q_norm, run), k_norm=_weight(block.k_norm, run), eps=block.norm_eps,
    )  # fmt: skip
    mixed = block.o.input_buffer(x, len(x))
    stats = run.attend.forward(block, *_split(block, qkv), _by_head(block, mixed))
    out, h_o = block.o.forward(mixed, run)
    y, left = _leave(block, block.attention_out_norm, out, run)
    return x, y, Attended(x, rstd, qkv, raw, mixed, stats, h_qkv, h_o, left)


def attention_half_backward(
    block: Block, grad: torch.Tensor, codes: Rows | None, saved: Attended, run: Pass, need_input: bool,
    below: Block | None,
) -> tuple[torch.Tensor | None, Rows | None]:  # fmt: skip
    """The stream's gradient in a buffer with room, and its codes if o reads such -> both behind the half, for the block
    below."""
    x, rstd, qkv, raw, mixed, stats, h_qkv, h_o, left = saved
    grad_out = _leave_backward(block, block.o, block.attention_out_norm, grad, left, run)
    grad_mixed, g = block.o.backward(grad_out, h_o, run, rows=codes)
    assert grad_mixed is not None
    block.o.learn(grad_out, g, mixed[:, : block.o.width_in], run)

    q, k, v = _split(block, qkv)
    grads, grad_qkv = run.attend.grad_buffers(block, q, k), None
    if grads is None:
        grad_qkv = block.qkv.grad_buffer(x, len(x))
        grads = _split(block, grad_qkv)
    run.flush()
    run.attend.backward(block, _by_head(block, grad_mixed), q, k, v, _by_head(block, mixed), stats, grads)
    del grad_mixed
    if grad_qkv is None:  # only now: it need not lie beside attention's own memory
        grad_qkv = block.qkv.grad_buffer(x, len(x))
    # In the first block nothing below learns, so the input's gradient is not computed.
    norm = block.attention_norm
    need_input = need_input or (norm is not None and norm.grad is not None)
    rows, tables = None, run.tables[block.rope]
    if need_input and block.q_norm is None:
        rows = block.qkv.rope_backward(grads, grad_qkv, tables, block.heads, run)
    else:
        rope.finish_backward(
            grads, grad_qkv[:, : block.qkv.width_out], *tables, block.heads, raw,
            q_norm=_weight(block.q_norm, run), k_norm=_weight(block.k_norm, run), eps=block.norm_eps,
            grad_q_norm=block.q_norm.grad if block.q_norm else None,
            grad_k_norm=block.k_norm.grad if block.k_norm else None,
        )  # fmt: skip
    del grads
    if block.qkv_bias is not None and block.qkv_bias.grad is not None:
        block.qkv_bias.grad.add_(grad_qkv[:, : block.qkv.width_out].sum(0, dtype=torch.float32))

    grad_read, g = block.qkv.backward(grad_qkv, h_qkv, run, need_input, rows)
    del rows
    block.qkv.learn(grad_qkv, g, x, run, _normed(norm, rstd, run))
    after, codes = None, None
    if grad_read is not None:
        wrote = None if below is None else _wrote(below, below.down, below.mlp_out_norm)
        after, codes = _enter_backward(norm, grad_read, x, rstd, grad, run, wrote)
    run.join()
    return after, codes


def mlp_half(
    block: Block, x: torch.Tensor, y: torch.Tensor | None, run: Pass
) -> tuple[torch.Tensor, torch.Tensor, Mlped]:
    """(x, y) -> (s = x + y, down(act(gate_up(norm(s)))), what the backward needs)."""
    routed = None
    if block.experts is not None:
        x, rstd, normed, routed = _routed(block, block.experts, x, y, run)
        out, gate_up, h_gate_up, h_down = block.experts.forward(normed, routed, run.adapted)
    else:
        first, second = block.plain_mlp
        x, rstd, gate_up, h_gate_up = _enter(block, first, block.mlp_norm, x, y, run, wide=True)
        out, h_down = second.after_act(gate_up[:, : first.width_out], run, block.activation)
    y, left = _leave(block, block.mlp_out_norm, out, run)
    return x, y, Mlped(x, rstd, gate_up, h_gate_up, h_down, left, routed)


def mlp_half_again(block: Block, x: torch.Tensor, y: torch.Tensor, run: Pass) -> Mlped:
    """What `mlp_half` keeps. What it says is in the stream already, so its last product is not made again, unless a
    norm behind it wants to know."""
    if block.mlp_out_norm is not None:
        return mlp_half(block, x, y, run)[2]
    if block.experts is not None:
        x, rstd, normed, routed = _routed(block, block.experts, x, y, run)
        return Mlped(x, rstd, *block.experts.again(normed, routed, run.adapted), Left(None, None), routed)
    first, second = block.plain_mlp
    x, rstd, gate_up, h_gate_up = _enter(block, first, block.mlp_norm, x, y, run, wide=True)
    h_down = second.low_after_act(gate_up[:, : first.width_out], run, block.activation)
    return Mlped(x, rstd, gate_up, h_gate_up, h_down, Left(None, None))


def gate_up_again(block: Block, saved: Mlped, run: Pass) -> Mlped:
    """Fills in the gate_up product that was not kept."""
    if block.experts is not None:
        normed = _normed(block.mlp_norm, saved.rstd, run)
        assert normed is not None and saved.routed is not None
        return saved._replace(gate_up=block.experts.first(normed.of(saved.x), saved.routed, run.adapted)[0])
    first, h = block.plain_mlp[0], saved.h_gate_up
    return saved._replace(gate_up=_enter(block, first, block.mlp_norm, saved.x, None, run, wide=True, h=h)[2])


def mlp_half_backward(
    block: Block, grad: torch.Tensor, codes: Rows | None, saved: Mlped, run: Pass
) -> tuple[torch.Tensor, Rows | None]:
    """The stream's gradient in a buffer with room, and its codes if down reads such -> both behind the half, for o."""
    x, rstd, gate_up, h_gate_up, h_down, left, routed = saved
    grad_out = _leave_backward(block, block.down, block.mlp_out_norm, grad, left, run)
    norm = _normed(block.mlp_norm, rstd, run)
    if block.experts is not None:
        assert norm is not None and routed is not None
        grad_read: torch.Tensor | None = block.experts.backward(
            grad_out[:, : x.shape[1]], norm.of(x), routed, gate_up, h_gate_up, h_down
        )
    else:
        first, second = block.plain_mlp
        grad_act, g = second.backward(grad_out, h_down, run, rows=codes)
        assert grad_act is not None
        grad_gate_up, act, rows = first.act_backward(grad_act, gate_up, run, block.activation)
        del grad_act
        second.learn(grad_out, g, act, run)
        del act
        grad_read, g = first.backward(grad_gate_up, h_gate_up, run, rows=rows)
        first.learn(grad_gate_up, g, x, run, norm)
        del grad_gate_up, rows
    assert grad_read is not None
    return _enter_backward(
        block.mlp_norm, grad_read, x, rstd, grad, run, _wrote(block, block.o, block.attention_out_norm)
    )


def _routed(
    block: Block, experts: Experts, x: torch.Tensor, y: torch.Tensor | None, run: Pass
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Routed]:
    """(s = x + y, rstd, norm(s), which experts it goes to). y is overwritten by the sum."""
    assert block.mlp_norm is not None
    normed = torch.empty_like(x)
    x, rstd = rms_norm.add_forward(x, y, block.mlp_norm.of(run.adapted), block.norm_eps, normed)
    return x, rstd, normed, experts.route(normed)


def _enter(
    block: Block,
    projection: Projection,
    norm: NormWeight | None,
    x: torch.Tensor,
    y: torch.Tensor | None,
    run: Pass,
    *,
    wide: bool = False,
    h: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(s = x + y, rstd, the product of norm(s), or of s itself, h). y is overwritten by the sum. `wide` and a known
    `h`: see Projection.forward."""
    if norm is not None:
        return projection.after_norm(x, y, norm.of(run.adapted), block.norm_eps, run, wide=wide, h=h)
    x = x if y is None else y.add_(x)
    read = x
    if projection.room:
        read = projection.input_buffer(x, len(x))
        read[:, : projection.width_in].copy_(x)
    return x, x.new_empty(0, dtype=torch.float32), *projection.forward(read, run, wide=wide, h=h)


def _enter_backward(
    norm: NormWeight | None, grad_read: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, grad: torch.Tensor,
    run: Pass, wrote: Projection | None,
) -> tuple[torch.Tensor, Rows | None]:  # fmt: skip
    """The stream's gradient with what came through the half: in place, or elsewhere while sums aside read it still. It
    is dY of the projection that `wrote` the stream before; if that reads codes, they come along."""
    width = x.shape[1]
    after = grad if run.aside is None else with_room(grad, len(grad), width, grad.shape[1] - width)
    if norm is None:
        torch.add(grad[:, :width], grad_read, out=after[:, :width])
    elif wrote is not None and norm.grad is None:
        normed = Normed(rstd, norm.of(run.adapted))
        return after, wrote.norm_backward(grad_read, x, normed, grad[:, :width], after, run)
    else:
        weight = norm.of(run.adapted)
        rms_norm.add_backward(grad_read, x, rstd, weight, grad[:, :width], norm.grad, after[:, :width])
    return after, None


def _wrote(block: Block, last: Projection | None, norm: NormWeight | None) -> Projection | None:
    """A half's last projection, if its dY is the stream's gradient as it is."""
    return last if norm is None and block.residual_scale == 1 else None


def _leave(block: Block, norm: NormWeight | None, out: torch.Tensor, run: Pass) -> tuple[torch.Tensor, Left]:
    """What a half adds to the stream: what it computed, normed and scaled as the family has it."""
    if norm is None:
        return (out if block.residual_scale == 1 else out.mul_(block.residual_scale)), Left(None, None)
    y = torch.empty_like(out)
    _, rstd = rms_norm.add_forward(out, None, norm.of(run.adapted), block.norm_eps, y)
    return y, Left(out, rstd)


def _leave_backward(
    block: Block, last: Projection | None, norm: NormWeight | None, grad: torch.Tensor, left: Left, run: Pass
) -> torch.Tensor:
    """The gradient of what the half's last projection computed, in a buffer with its room."""
    if norm is None and block.residual_scale == 1:
        return grad
    width, room = block.o.width_out, 0 if last is None else last.room
    grad_out = with_room(grad, len(grad), width, room)
    if norm is None:
        torch.mul(grad[:, :width], block.residual_scale, out=grad_out[:, :width])
    else:
        assert left.out is not None and left.rstd is not None
        weight = norm.of(run.adapted)
        rms_norm.add_backward(grad[:, :width], left.out, left.rstd, weight, None, norm.grad, grad_out[:, :width])
    return grad_out


def _normed(norm: NormWeight | None, rstd: torch.Tensor, run: Pass) -> Normed | None:
    return None if norm is None else Normed(rstd, norm.of(run.adapted))


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
