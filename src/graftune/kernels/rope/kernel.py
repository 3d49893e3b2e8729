"""`finish_` and its backward, one launch each. A program has some tokens of one head as two tiles [BT, R/2], so that
both halves are in registers and every value is read and written once. It computes in fp32.

Programs for the heads of one token block are adjacent: they share its rows of cos and sin, which then come from cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch


@launch.kernel
def _finish(
    qkv_ptr, cos_ptr, sin_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, raw_ptr, tokens, eps,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, WORK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % WORK
    at = (tl.program_id(0) // WORK) * BT + tl.arange(0, BT)
    rows = at.to(tl.int64)[:, None]
    cols = tl.arange(0, BC)
    inside = cols < HALF
    mask = (at < tokens)[:, None] & inside[None, :]
    place = qkv_ptr + rows * ((N + 2 * K) * H) + head * H + cols[None, :]
    a = tl.load(place, mask, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask, other=0.0).to(tl.float32)
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


@launch.kernel
def _finish_backward(
    dq_ptr, dk_ptr, dv_ptr, grad_ptr, cos_ptr, sin_ptr, raw_ptr, q_norm_ptr, k_norm_ptr, parts_ptr, tokens,
    dq_stride, dk_stride, dv_stride, grad_stride, eps, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, WORK: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_PARTS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dk and dv have K * GROUP heads; GROUP of them are summed. With n = x * rstd, g the unrotated gradient and w the
    norm's weight: dx = rstd (g w - n mean(g w n)). The sum of g n over this program's tokens goes to parts
    [blocks, WORK, H]."""
    head = tl.program_id(0) % WORK
    at = (tl.program_id(0) // WORK) * BT + tl.arange(0, BT)
    rows = at.to(tl.int64)[:, None]
    cols = tl.arange(0, BC)
    inside = cols < HALF
    mask = (at < tokens)[:, None] & inside[None, :]
    target = grad_ptr + rows * grad_stride + head * H
    place = target + cols[None, :]
    if head < N:
        turned_a, turned_b = _added(dq_ptr + rows * dq_stride + head * H, target, at < tokens, cols, 1, H, HALF, REST)
    elif head < N + K:
        turned_a, turned_b = _added(
            dk_ptr + rows * dk_stride + (head - N) * (GROUP * H), target, at < tokens, cols, GROUP, H, HALF, REST
        )
    else:
        turned_a, turned_b = _added(
            dv_ptr + rows * dv_stride + (head - N - K) * (GROUP * H), target, at < tokens, cols, GROUP, H, HALF, REST
        )
    if head >= N + K:
        tl.store(place, turned_a.to(grad_ptr.dtype.element_ty), mask)
        tl.store(place + HALF, turned_b.to(grad_ptr.dtype.element_ty), mask)
        return
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
def _added(start, target, alive, cols, GROUP: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr):
    """Sum GROUP heads from `start` on and return the two rotated halves in fp32; later columns are only copied."""
    mask = alive[:, None] & (cols < HALF)[None, :]
    first = tl.load(start + cols[None, :], mask, other=0.0).to(tl.float32)
    second = tl.load(start + HALF + cols[None, :], mask, other=0.0).to(tl.float32)
    for member in tl.static_range(1, GROUP):
        first += tl.load(start + member * H + cols[None, :], mask, other=0.0).to(tl.float32)
        second += tl.load(start + member * H + HALF + cols[None, :], mask, other=0.0).to(tl.float32)
    if 2 * HALF < H:
        last = 2 * HALF + tl.arange(0, REST)[None, :]
        moved = alive[:, None] & (last < H)
        rest = tl.load(start + last, moved, other=0.0).to(tl.float32)
        for member in tl.static_range(1, GROUP):
            rest += tl.load(start + member * H + last, moved, other=0.0).to(tl.float32)
        tl.store(target + last, rest.to(target.dtype.element_ty), moved)
    return first, second


@triton.jit
def _rstd(a, b, alive, eps, H: tl.constexpr):
    """1 / sqrt(mean square + eps) of each row; rows after the last token get 1, since eps may be 0."""
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
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    queries, keys, width = heads
    tokens = len(qkv)
    raw = qkv.new_empty((tokens, queries + keys, width) if q_norm is not None else 0)
    # Without a bias, v stays unchanged and needs no program.
    work = queries + keys + (keys if bias is not None else 0)
    bt, bc, warps = _blocks(tokens, 2 * cos.shape[1])
    if tokens:
        _finish[(triton.cdiv(tokens, bt) * work,)](
            qkv, cos, sin, bias, q_norm, k_norm, raw, tokens, eps, N=queries, K=keys, H=width,
            HALF=cos.shape[1], WORK=work, HAS_BIAS=bias is not None, HAS_NORM=q_norm is not None, BT=bt, BC=bc,
            num_warps=warps,
        )  # fmt: skip
    return raw


def finish_backward(
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
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
    bt, bc, warps = _blocks(tokens, 2 * cos.shape[1])
    blocks = triton.cdiv(tokens, bt)
    parts, dv = None, grads[2]
    # v's gradient is only copied, and not even that if it is in its place already.
    work = queries + keys
    if launch.address(dv) != launch.address(grad_qkv[:, work * width :]):
        work += keys
    if q_norm is not None and (grad_q_norm is not None or grad_k_norm is not None):
        parts = torch.empty(blocks, work, width, dtype=torch.float32, device=grad_qkv.device)
    _finish_backward[(blocks * work,)](
        *grads, grad_qkv, cos, sin, raw, q_norm, k_norm, parts, tokens, *(g.stride(0) for g in grads),
        grad_qkv.stride(0), eps, N=queries, K=keys, H=width, GROUP=dv.shape[1] // keys, HALF=cos.shape[1],
        REST=launch.power_of_two(max(1, width - 2 * cos.shape[1])), WORK=work, HAS_NORM=q_norm is not None,
        HAS_PARTS=parts is not None, BT=bt, BC=bc, num_warps=warps,
    )  # fmt: skip
    if parts is not None and grad_q_norm is not None:
        grad_q_norm.add_(parts[:, :queries].sum((0, 1)))
    if parts is not None and grad_k_norm is not None:
        grad_k_norm.add_(parts[:, queries : queries + keys].sum((0, 1)))


def _blocks(tokens: int, width: int) -> tuple[int, int, int]:
    """Tokens per tile, padded columns per tile, warps: eight values per thread and tile. (With 32 values the backward
    takes 66 microseconds instead of 53 at 8B and 8192 tokens, and 6.4 instead of 5.7 at 512 tokens.)"""
    columns = launch.power_of_two(width // 2, 16)
    return min(max(4, 1024 // columns), launch.power_of_two(tokens)), columns, 4
