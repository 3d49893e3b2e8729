# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""Gradients of adapters: thin products summed over tokens and added to the fp32 arena.

`both` computes g = s dY B and dB = s dY' h in one pass over dY: a block of columns has its whole sum over tokens, but
only a part of g, and `kernel.add_up` adds the parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.lora_linear import kernel
from graftune.kernels.lora_linear.kernel import of_member

AddUp = Callable[[torch.Tensor, torch.Tensor, tuple[int, ...]], None]  # parts, output, number of parts per member


@triton.jit
def _member(pid, counts):
    """The member that a block belongs to, and the block's number in it; `counts`: blocks per member."""
    member = 0
    block = pid
    total = 0
    for index in tl.static_range(1, len(counts)):
        total += counts[index - 1]
        member = tl.where(pid >= total, index, member)
        block = tl.where(pid >= total, pid - total, block)
    return member, block


@launch.kernel
def _columns(
    y_ptr, h_ptr, row_scale_ptr, col_scale_ptr, out_ptr,
    tokens, per_split, y_stride, h_stride, split_stride, out_c, out_r, scale,
    starts, stops, offsets, counts,
    R: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    HAS_ROWS: tl.constexpr, FP16: tl.constexpr, HAS_COLS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[c, r] (+)= scale * cs[c] * sum over t of rs[t] y[t, c] h[t, r], for the columns of one member."""
    member, block = _member(tl.program_id(0), counts)
    start, stop, row = of_member(member, starts), of_member(member, stops), of_member(member, offsets)
    split = tl.program_id(1)
    local = block * BC + tl.arange(0, BC)
    cols = start + local
    inside = cols < stop
    ranks = tl.arange(0, RP)
    acc = tl.zeros([BC, RP], tl.float32)
    first = split * per_split
    for t in range(first, min(first + per_split, tokens), BT):
        at = t + tl.arange(0, BT)
        alive = at < tokens
        y = tl.load(
            y_ptr + at[:, None].to(tl.int64) * y_stride + cols[None, :], alive[:, None] & inside[None, :], other=0.0
        )
        h = tl.load(
            h_ptr + at[:, None].to(tl.int64) * h_stride + member * R + ranks[None, :],
            alive[:, None] & (ranks < R)[None, :], other=0.0,
        )  # fmt: skip
        if HAS_ROWS:
            rows = tl.load(row_scale_ptr + at, alive, other=0.0)[:, None]
            if FP16:  # normed values are near 1, but a gradient times rstd may underflow
                y = (y.to(tl.float32) * rows).to(y.dtype)
            else:
                h = (h.to(tl.float32) * rows).to(h.dtype)
        acc = tl.dot(tl.trans(y), h, acc, input_precision=PRECISION)
    acc *= scale
    if HAS_COLS:
        acc *= tl.load(col_scale_ptr + cols, inside, other=0.0)[:, None]
    part = out_ptr + split.to(tl.int64) * split_stride
    where = part + (row + local)[:, None].to(tl.int64) * out_c + ranks[None, :] * out_r
    mask = inside[:, None] & (ranks < R)[None, :]
    if ADD:
        acc += tl.load(where, mask, other=0.0)
    tl.store(where, acc, mask)


@launch.kernel
def _both(
    y_ptr, h_ptr, w_ptr, g_ptr, out_ptr, tokens, per_split, y_stride, h_stride, w_stride, g_stride, split_stride, scale,
    starts, stops, offsets, counts, WIDTH: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_columns` and `_rows` in one pass over y: out[c, r] (+)= scale * sum over t of y[t, c] h[t, r], and for this
    block of columns g[block, t, member * R + r] = scale * sum over c of y[t, c] w[c, r]."""
    member, block = _member(tl.program_id(0), counts)
    start, stop, row = of_member(member, starts), of_member(member, stops), of_member(member, offsets)
    split = tl.program_id(1)
    local = block * BC + tl.arange(0, BC)
    cols = start + local
    inside = cols < stop
    ranks = tl.arange(0, RP)
    real = (ranks < R)[None, :]
    w = tl.load(
        w_ptr + (row + local)[:, None].to(tl.int64) * w_stride + ranks[None, :], inside[:, None] & real, other=0.0
    )
    acc = tl.zeros([BC, RP], tl.float32)
    first = split * per_split
    part = g_ptr + block.to(tl.int64) * g_stride + member * R + ranks[None, :]
    for t in range(first, min(first + per_split, tokens), BT):
        at = t + tl.arange(0, BT)
        alive = (at < tokens)[:, None]
        there = at[:, None].to(tl.int64)
        y = tl.load(y_ptr + there * y_stride + cols[None, :], alive & inside[None, :], other=0.0)
        h = tl.load(h_ptr + there * h_stride + member * R + ranks[None, :], alive & real, other=0.0)
        acc = tl.dot(tl.trans(y), h, acc, input_precision=PRECISION)
        tl.store(part + there * WIDTH, tl.dot(y, w, input_precision=PRECISION) * scale, alive & real)
    whole = out_ptr + split.to(tl.int64) * split_stride
    where = whole + (row + local)[:, None].to(tl.int64) * R + ranks[None, :]
    acc *= scale
    if ADD:
        acc += tl.load(where, inside[:, None] & real, other=0.0)
    tl.store(where, acc, inside[:, None] & real)


def _columns_tile(rank: int, tokens: int) -> tuple[int, int, int, int, int]:
    """Columns and tokens per tile, warps, stages, desired number of programs."""
    return (64, 128, 4, 3, 256) if tokens < 4096 or rank <= 32 else (128, 64, 4, 3, 256)


def sum_columns_(
    total: torch.Tensor,
    y: torch.Tensor,
    h: torch.Tensor,
    columns: tuple[tuple[int, int], ...],
    *,
    rank: int,
    scale: float = 1.0,
    transposed: bool = False,
    row_scale: torch.Tensor | None = None,
    col_scale: torch.Tensor | None = None,
) -> None:
    """total += scale * y' h in fp32. total is contiguous: [sum of widths, rank], or [rank, width] if `transposed`,
    which serves one member only."""
    assert total.is_contiguous()
    tokens = len(y)
    rp = launch.power_of_two(rank, 16)
    bc, bt, warps, stages, programs = _columns_tile(rp, tokens)
    starts, stops, offsets, counts = kernel.places(columns, bc)
    blocks = sum(counts)
    splits = 1 if blocks >= programs // 2 else min(triton.cdiv(tokens, 4 * bt), triton.cdiv(programs, blocks))
    per_split = triton.cdiv(triton.cdiv(tokens, splits), bt) * bt
    splits = triton.cdiv(tokens, per_split)
    out = total if splits == 1 else torch.empty(splits, *total.shape, dtype=torch.float32, device=y.device)
    strides = (1, total.shape[1]) if transposed else (total.shape[1], 1)
    _columns[(blocks, splits)](
        y, h, row_scale, col_scale, out, tokens, per_split, y.stride(0), h.stride(0), total.numel(), *strides, scale,
        starts, stops, offsets, counts, R=rank, RP=rp, BT=bt, BC=bc, HAS_ROWS=row_scale is not None,
        FP16=y.dtype == torch.float16, HAS_COLS=col_scale is not None, ADD=splits == 1, PRECISION=kernel.precision(y),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        kernel.add_up(out, total, add=True)


def both(
    total: torch.Tensor,
    y: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    columns: tuple[tuple[int, int], ...],
    *,
    rank: int,
    scale: float,
    tail: torch.Tensor | None = None,
    add_up: AddUp | None = None,
) -> torch.Tensor:
    """`sum_columns_` into total and `rows`, with one read of y. `add_up` replaces kernel.py's sum of the parts of
    `rows`; it excludes a tail."""
    assert total.is_contiguous() and weight.stride(1) == 1 and (tail is None or add_up is None)
    tokens, rp = len(y), launch.power_of_two(rank, 16)
    bc, bt, warps, stages, programs = _both_tile(rp, tokens, total.shape[0], y.element_size())
    starts, stops, offsets, counts = kernel.places(columns, bc)
    blocks = sum(counts)
    splits = max(1, min(triton.cdiv(tokens, 4 * bt), programs // blocks))  # one wave: more programs would wait for it
    per_split = triton.cdiv(triton.cdiv(tokens, splits), bt) * bt
    splits = triton.cdiv(tokens, per_split)
    sums = total if splits == 1 else torch.empty(splits, *total.shape, dtype=torch.float32, device=y.device)
    parts = torch.empty(max(counts), tokens, rank * len(columns), dtype=torch.float32, device=y.device)
    g = torch.empty(parts.shape[1:], dtype=y.dtype, device=y.device)
    _both[(blocks, splits)](
        y, h, weight, parts, sums, tokens, per_split, y.stride(0), h.stride(0), weight.stride(0), g.numel(),
        total.numel(), scale, starts, stops, offsets, counts, WIDTH=g.shape[1], R=rank, RP=rp, BT=bt, BC=bc,
        ADD=splits == 1, PRECISION=kernel.precision(y), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if add_up is None:
        kernel.add_up(parts, g, add=False, tail=tail, counts=counts)
    else:
        add_up(parts, g, counts)
    if splits > 1:
        kernel.add_up(sums, total, add=True)
    kernel.clear(g.shape[1], tail)
    return g


def _both_tile(rank: int, tokens: int, width: int, size: int = 2) -> tuple[int, int, int, int, int]:
    """Columns and tokens per tile, warps, stages, desired number of programs. `size`: bytes of a value of y."""
    if rank > 32:
        return 128, 64, 4, 3, 264
    if rank <= 16 and size == 2 and tokens >= 8192 and width >= 4096:  # shared memory: 223 kB on Hopper, 94 kB before
        return 512, 64, 8, 3, 132
    if tokens >= 2048:
        return 256, 64, 4, 3, 264
    return 128, 64 if width > 128 * 132 else 128, 4, 3, 264
