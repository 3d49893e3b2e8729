"""`finish_` and its way back, one launch each: a program owns some tokens of one head, as two tiles [BT, H/2], so that
the halves meet in registers and every value is read and written once. In between all is fp32.

The heads of one token block run side by side: they share its rows of cos, sin and h, which then come from cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels.launch import power_of_two
from graftune.kernels.lora_linear.reference import Low


@triton.jit
def _finish(
    qkv_ptr, cos_ptr, sin_ptr, bias_ptr, h_ptr, up_ptr, q_norm_ptr, k_norm_ptr, raw_ptr, tokens, scale, eps,
    N: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, WORK: tl.constexpr,
    R: tl.constexpr, RANKS: tl.constexpr,
    Q_MEMBER: tl.constexpr, K_MEMBER: tl.constexpr, V_MEMBER: tl.constexpr,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = 2 * HALF
    head = tl.program_id(0) % WORK
    at = (tl.program_id(0) // WORK) * BT + tl.arange(0, BT)
    rows = at.to(tl.int64)[:, None]
    cols = tl.arange(0, BC)
    inside = cols < HALF
    mask = (at < tokens)[:, None] & inside[None, :]
    place = qkv_ptr + rows * ((N + 2 * K) * H) + head * H + cols[None, :]
    a = tl.load(place, mask, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask, other=0.0).to(tl.float32)
    if HAS_LOW:
        member = tl.where(head < N, Q_MEMBER, tl.where(head < N + K, K_MEMBER, V_MEMBER))
        if member >= 0:
            row = tl.where(
                head < N, Q_ROW + head * H, tl.where(head < N + K, K_ROW + (head - N) * H, V_ROW + (head - N - K) * H)
            )
            ranks = tl.arange(0, BR)
            low = tl.load(
                h_ptr + rows * RANKS + member * R + ranks[None, :],
                (at < tokens)[:, None] & (ranks < R)[None, :], other=0.0,
            )  # fmt: skip
            up = up_ptr + (row + cols)[None, :] * R + ranks[:, None]
            alive = inside[None, :] & (ranks < R)[:, None]
            a += scale * tl.dot(low, tl.load(up, alive, other=0.0), input_precision="ieee")
            b += scale * tl.dot(low, tl.load(up + HALF * R, alive, other=0.0), input_precision="ieee")
    if HAS_BIAS:
        a += tl.load(bias_ptr + head * H + cols, inside, other=0.0).to(tl.float32)[None, :]
        b += tl.load(bias_ptr + head * H + HALF + cols, inside, other=0.0).to(tl.float32)[None, :]
    if head < N + K:
        if HAS_NORM:
            kept = raw_ptr + rows * ((N + K) * H) + head * H + cols[None, :]
            tl.store(kept, a.to(raw_ptr.dtype.element_ty), mask)
            tl.store(kept + HALF, b.to(raw_ptr.dtype.element_ty), mask)
            rstd = _rstd(a, b, at < tokens, eps, H)[:, None]
            a *= rstd * _weight(q_norm_ptr, k_norm_ptr, head, N, cols, inside)[None, :]
            b *= rstd * _weight(q_norm_ptr, k_norm_ptr, head, N, HALF + cols, inside)[None, :]
        cos = tl.load(cos_ptr + rows * HALF + cols[None, :], mask, other=0.0)
        sin = tl.load(sin_ptr + rows * HALF + cols[None, :], mask, other=0.0)
        turned = b * cos + a * sin
        a = a * cos - b * sin
        b = turned
    tl.store(place, a.to(qkv_ptr.dtype.element_ty), mask)
    tl.store(place + HALF, b.to(qkv_ptr.dtype.element_ty), mask)


@triton.jit
def _finish_backward(
    grad_ptr, cos_ptr, sin_ptr, raw_ptr, q_norm_ptr, k_norm_ptr, parts_ptr, tokens, grad_stride, eps,
    N: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, HAS_PARTS: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """With n = x * rstd, g the unrotated gradient and w the norm's weight: dx = rstd (g w - n mean(g w n)), and the
    sum of g n over this program's tokens goes to parts [blocks, N + K, H]."""
    H: tl.constexpr = 2 * HALF
    head = tl.program_id(0) % (N + K)
    at = (tl.program_id(0) // (N + K)) * BT + tl.arange(0, BT)
    rows = at.to(tl.int64)[:, None]
    cols = tl.arange(0, BC)
    inside = cols < HALF
    mask = (at < tokens)[:, None] & inside[None, :]
    place = grad_ptr + rows * grad_stride + head * H + cols[None, :]
    turned_a = tl.load(place, mask, other=0.0).to(tl.float32)
    turned_b = tl.load(place + HALF, mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + rows * HALF + cols[None, :], mask, other=0.0)
    sin = tl.load(sin_ptr + rows * HALF + cols[None, :], mask, other=0.0)
    a = turned_a * cos + turned_b * sin
    b = turned_b * cos - turned_a * sin
    if HAS_NORM:
        kept = raw_ptr + rows * ((N + K) * H) + head * H + cols[None, :]
        n_a = tl.load(kept, mask, other=0.0).to(tl.float32)
        n_b = tl.load(kept + HALF, mask, other=0.0).to(tl.float32)
        rstd = _rstd(n_a, n_b, at < tokens, eps, H)[:, None]
        n_a *= rstd
        n_b *= rstd
        if HAS_PARTS:
            part = parts_ptr + tl.program_id(0).to(tl.int64) * H + cols
            tl.store(part, tl.sum(a * n_a, 0), inside)
            tl.store(part + HALF, tl.sum(b * n_b, 0), inside)
        a *= _weight(q_norm_ptr, k_norm_ptr, head, N, cols, inside)[None, :]
        b *= _weight(q_norm_ptr, k_norm_ptr, head, N, HALF + cols, inside)[None, :]
        mean = ((tl.sum(a * n_a, 1) + tl.sum(b * n_b, 1)) / H)[:, None]
        a = (a - n_a * mean) * rstd
        b = (b - n_b * mean) * rstd
    tl.store(place, a.to(grad_ptr.dtype.element_ty), mask)
    tl.store(place + HALF, b.to(grad_ptr.dtype.element_ty), mask)


@triton.jit
def _rstd(a, b, alive, eps, H: tl.constexpr):
    """1 / sqrt(mean square + eps) of each row; rows beyond the last token get 1, since eps may be 0."""
    square = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / H + eps
    return 1.0 / tl.sqrt(tl.where(alive, square, 1.0))


@triton.jit
def _weight(q_norm_ptr, k_norm_ptr, head, N: tl.constexpr, cols, inside):
    of_q = tl.load(q_norm_ptr + cols, inside, other=0.0)
    of_k = tl.load(k_norm_ptr + cols, inside, other=0.0)
    return tl.where(head < N, of_q, of_k).to(tl.float32)


def finish_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int, int],
    bias: torch.Tensor | None,
    low: Low | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    queries, keys, width = heads
    tokens = len(qkv)
    raw = qkv.new_empty((tokens, queries + keys, width) if q_norm is not None else 0)
    members, first_rows = _members(low, heads)
    # Where nothing is added to v, it is what it should be already.
    work = queries + keys + (keys if bias is not None or members[2] >= 0 else 0)
    rank = low.rank if low is not None else 1
    assert rank <= 64 and (low is None or (low.h.is_contiguous() and low.up.is_contiguous()))
    bt, bc, warps = _blocks(tokens, width)
    if tokens:
        _finish[(triton.cdiv(tokens, bt) * work,)](
            qkv, cos, sin, bias, low.h if low else None, low.up if low else None, q_norm, k_norm, raw, tokens,
            low.scale if low else 0.0, eps, N=queries, K=keys, HALF=width // 2, WORK=work,
            R=rank, RANKS=low.h.shape[1] if low else 1,
            Q_MEMBER=members[0], K_MEMBER=members[1], V_MEMBER=members[2],
            Q_ROW=first_rows[0], K_ROW=first_rows[1], V_ROW=first_rows[2],
            HAS_LOW=low is not None, HAS_BIAS=bias is not None, HAS_NORM=q_norm is not None,
            BT=bt, BC=bc, BR=power_of_two(rank, 16), num_warps=warps,
        )  # fmt: skip
    return raw


def finish_backward_(
    grad_qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int, int],
    raw: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    grad_q_norm: torch.Tensor | None,
    grad_k_norm: torch.Tensor | None,
) -> None:
    queries, keys, width = heads
    tokens = len(grad_qkv)
    if tokens == 0:
        return
    bt, bc, warps = _blocks(tokens, width)
    blocks = triton.cdiv(tokens, bt)
    parts = None
    if q_norm is not None and (grad_q_norm is not None or grad_k_norm is not None):
        parts = torch.empty(blocks, queries + keys, width, dtype=torch.float32, device=grad_qkv.device)
    _finish_backward[(blocks * (queries + keys),)](
        grad_qkv, cos, sin, raw, q_norm, k_norm, parts, tokens, grad_qkv.stride(0), eps, N=queries, K=keys,
        HALF=width // 2, HAS_NORM=q_norm is not None, HAS_PARTS=parts is not None, BT=bt, BC=bc, num_warps=warps,
    )  # fmt: skip
    if parts is not None and grad_q_norm is not None:
        grad_q_norm.add_(parts[:, :queries].sum((0, 1)))
    if parts is not None and grad_k_norm is not None:
        grad_k_norm.add_(parts[:, queries:].sum((0, 1)))


def _blocks(tokens: int, width: int) -> tuple[int, int, int]:
    """Tokens of a tile, padded columns of half a head (a dot wants 16), warps: at most 32 values a thread and tile."""
    columns = power_of_two(width // 2, 16)
    rows = min(64 if columns <= 128 else 32, power_of_two(tokens, 16))
    return rows, columns, 8 if rows * columns > 4096 else 4


def _members(low: Low | None, heads: tuple[int, int, int]) -> tuple[list[int], list[int]]:
    """For q, k and v: which member of the adapters' group it is (-1: none), and where its rows of `up` begin."""
    queries, keys, width = heads
    ends = [queries * width, (queries + keys) * width, (queries + 2 * keys) * width]
    ranges = list(zip([0, *ends], ends, strict=False))
    members, first_rows = [-1] * 3, [0] * 3
    for index, (columns, rows, _) in enumerate(low.members() if low is not None else []):
        which = ranges.index((columns.start, columns.stop))
        members[which], first_rows[which] = index, rows.start
    return members, first_rows
