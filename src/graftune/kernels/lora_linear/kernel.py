"""The thin products of adapters: one side is a few dozen wide, so they cost what reading the other side costs.

`rows` reads a wide [T, C] once and leaves [T, R] a member; `columns` sums over tokens and adds into the fp32 arena.
Where the grid would be too small for the chip, tokens (or columns) are split, the parts are written aside in fp32 and
added in a fixed order: the same bits every time, which atomics would not give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from graftune.kernels.launch import power_of_two
from graftune.kernels.lora_linear.reference import Copy


@triton.jit
def _member(pid, n0, n1, n2):
    """Which member a block belongs to, and its number there."""
    member = tl.where(pid < n0, 0, tl.where(pid < n0 + n1, 1, 2))
    return member, pid - tl.where(member == 0, 0, tl.where(member == 1, n0, n0 + n1))


@triton.jit
def _columns(
    y_ptr, h_ptr, row_scale_ptr, col_scale_ptr, out_ptr,
    tokens, per_split, y_stride, h_stride, split_stride, out_c, out_r, scale,
    c0, c1, c2, s0, s1, s2, o0, o1, o2, n0, n1, n2,
    R: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_COLS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[c, r] (+)= scale * cs[c] * sum over t of rs[t] y[t, c] h[t, r], for the columns of one member."""
    member, block = _member(tl.program_id(0), n0, n1, n2)
    start = tl.where(member == 0, c0, tl.where(member == 1, c1, c2))
    stop = tl.where(member == 0, s0, tl.where(member == 1, s1, s2))
    row = tl.where(member == 0, o0, tl.where(member == 1, o1, o2))
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
            h = (h.to(tl.float32) * tl.load(row_scale_ptr + at, alive, other=0.0)[:, None]).to(h.dtype)
        acc = tl.dot(tl.trans(y), h, acc, input_precision=PRECISION)
    acc *= scale
    if HAS_COLS:
        acc *= tl.load(col_scale_ptr + cols, inside, other=0.0)[:, None]
    where = out_ptr + split * split_stride + (row + local)[:, None].to(tl.int64) * out_c + ranks[None, :] * out_r
    mask = inside[:, None] & (ranks < R)[None, :]
    if ADD:
        acc += tl.load(where, mask, other=0.0)
    tl.store(where, acc, mask)


@triton.jit
def _rows(
    y_ptr, w_ptr, out_ptr, tail_ptr, tokens, per_split, y_stride, w_c, w_r, split_stride, out_stride, tail_stride,
    scale, c0, c1, c2, s0, s1, s2, o0, o1, o2, R: tl.constexpr, RP: tl.constexpr,
    TAIL: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[t, member * R + r] = scale * sum over the member's columns c of y[t, c] w[c, r]."""
    member = tl.program_id(1)
    start = tl.where(member == 0, c0, tl.where(member == 1, c1, c2))
    stop = tl.where(member == 0, s0, tl.where(member == 1, s1, s2))
    row = tl.where(member == 0, o0, tl.where(member == 1, o1, o2))
    split = tl.program_id(2)
    at = tl.program_id(0) * BT + tl.arange(0, BT)
    alive = at < tokens
    ranks = tl.arange(0, RP)
    acc = tl.zeros([BT, RP], tl.float32)
    first = split * per_split
    for c in range(first, min(first + per_split, stop - start), BC):
        local = c + tl.arange(0, BC)
        inside = local < stop - start
        y = tl.load(
            y_ptr + at[:, None].to(tl.int64) * y_stride + (start + local)[None, :],
            alive[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(
            w_ptr + (row + local)[:, None].to(tl.int64) * w_c + ranks[None, :] * w_r,
            inside[:, None] & (ranks < R)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(y, w, acc, input_precision=PRECISION)
    where = out_ptr + split * split_stride + at[:, None].to(tl.int64) * out_stride + member * R + ranks[None, :]
    value = (acc * scale).to(out_ptr.dtype.element_ty)
    mask = alive[:, None] & (ranks < R)[None, :]
    tl.store(where, value, mask)
    if TAIL:
        tl.store(tail_ptr + at[:, None].to(tl.int64) * tail_stride + member * R + ranks[None, :], value, mask)


@triton.jit
def _both(
    y_ptr, h_ptr, w_ptr, g_ptr, out_ptr, tokens, per_split, y_stride, h_stride, w_stride, g_stride, split_stride, scale,
    c0, c1, c2, s0, s1, s2, o0, o1, o2, n0, n1, n2, WIDTH: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_columns` and `_rows` of one y in one pass over it: out[c, r] (+)= scale * sum over t of y[t, c] h[t, r], and
    for this block of columns g[block, t, member * R + r] = scale * sum over c of y[t, c] w[c, r]."""
    member, block = _member(tl.program_id(0), n0, n1, n2)
    start = tl.where(member == 0, c0, tl.where(member == 1, c1, c2))
    stop = tl.where(member == 0, s0, tl.where(member == 1, s1, s2))
    row = tl.where(member == 0, o0, tl.where(member == 1, o1, o2))
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
    where = out_ptr + split * split_stride + (row + local)[:, None].to(tl.int64) * R + ranks[None, :]
    acc *= scale
    if ADD:
        acc += tl.load(where, inside[:, None] & real, other=0.0)
    tl.store(where, acc, inside[:, None] & real)


@triton.jit
def _add(
    parts_ptr, out_ptr, tail_ptr, n, width, rank, p0, p1, p2, tail_stride, ADD: tl.constexpr, TAIL: tl.constexpr,
    MEMBERS: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out (+)= the sum of the parts, always in the same order: p0 of them, or each member's own number."""
    at = tl.program_id(0) * B + tl.arange(0, B)  # 32 bits: dividing is what this costs
    each = tl.arange(0, P)[:, None]
    mask = (at < n)[None, :] & (each < p0)
    if MEMBERS:
        member = at % width // rank
        mask = (at < n)[None, :] & (each < tl.where(member == 0, p0, tl.where(member == 1, p1, p2))[None, :])
    total = tl.sum(tl.load(parts_ptr + each.to(tl.int64) * n + at[None, :], mask, other=0.0), 0)
    if ADD:
        total += tl.load(out_ptr + at, at < n, other=0.0)
    total = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, total, at < n)
    if TAIL:
        tl.store(tail_ptr + (at // width).to(tl.int64) * tail_stride + at % width, total, at < n)


@triton.jit
def _spread(source_ptr, table_ptr, scale_ptr, B: tl.constexpr):
    """One piece of one copy: [offset in the source, target's address, width, distance of rows, first, size]."""
    row = table_ptr + tl.program_id(0) * 6
    offset, target = tl.load(row), tl.load(row + 1).to(tl.pointer_type(source_ptr.dtype.element_ty))
    width, stride = tl.load(row + 2).to(tl.int32), tl.load(row + 3)
    first, size = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
    at = first + tl.arange(0, B)  # 32 bits: dividing is what this costs
    value = tl.load(source_ptr + offset + at, at < size, other=0.0).to(tl.float32)
    value = (value * tl.load(scale_ptr + tl.program_id(0))).to(source_ptr.dtype.element_ty)
    tl.store(target + (at // width).to(tl.int64) * stride + at % width, value, at < size)


def spread(copies: Sequence[Copy], tables: dict[str, torch.Tensor], block: int = 2048) -> None:
    flat = copies[0].source
    if "places" not in tables:
        rows, scales = [], []
        for source, target, scale in copies:
            assert source.is_contiguous() and source.dtype == target.dtype == flat.dtype and target.stride(1) == 1
            for first in range(0, source.numel(), block):
                place = (source.storage_offset(), target.data_ptr(), source.shape[1], target.stride(0), first)
                rows.append((*place, source.numel()))
                scales.append(scale)
        tables["places"] = torch.tensor(rows, dtype=torch.int64).to(flat.device)
        tables["scales"] = torch.tensor(scales, dtype=torch.float32).to(flat.device)
    whole = flat.as_strided((1,), (1,), 0)  # the arena's own beginning: offsets count from there
    _spread[(len(tables["places"]),)](whole, tables["places"], tables["scales"], B=block, num_warps=4)


def _columns_tile(rank: int, tokens: int) -> tuple[int, int, int, int, int]:
    """Columns and tokens of a tile, warps, stages, programs wanted."""
    return (64, 128, 4, 3, 256) if tokens < 4096 or rank > 32 else (128, 64, 4, 3, 256)


def _rows_tile(rank: int, tokens: int) -> tuple[int, int, int, int, int]:
    """Tokens and columns of a tile, warps, stages, programs wanted."""
    return (64, 128, 8, 4, 128) if tokens >= 4096 else (64, 64, 4, 4, 256)


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
    """Contiguous total [sum of widths, rank] (or, transposed, [rank, width] of a lone member) += scale * y' h, fp32."""
    assert total.is_contiguous()
    tokens = len(y)
    rp = power_of_two(rank, 16)
    bc, bt, warps, stages, programs = _columns_tile(rp, tokens)
    starts, stops, offsets, counts = _places(columns, bc)
    blocks = sum(counts)
    splits = 1 if blocks >= programs // 2 else min(triton.cdiv(tokens, 4 * bt), triton.cdiv(programs, blocks))
    per_split = triton.cdiv(triton.cdiv(tokens, splits), bt) * bt
    splits = triton.cdiv(tokens, per_split)
    out = total if splits == 1 else torch.empty(splits, *total.shape, dtype=torch.float32, device=y.device)
    strides = (1, total.shape[1]) if transposed else (total.shape[1], 1)
    _columns[(blocks, splits)](
        y, h, row_scale, col_scale, out, tokens, per_split, y.stride(0), h.stride(0), total.numel(), *strides, scale,
        *starts, *stops, *offsets, *counts, R=rank, RP=rp, BT=bt, BC=bc, HAS_ROWS=row_scale is not None,
        HAS_COLS=col_scale is not None, ADD=splits == 1, PRECISION=_precision(y), num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _add_up(out, total, add=True)


def rows(
    y: torch.Tensor,
    weight: torch.Tensor,
    columns: tuple[tuple[int, int], ...],
    *,
    rank: int,
    scale: float = 1.0,
    transposed: bool = False,
    tail: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, rank * members] = scale * y[:, columns] weight; weight [sum of widths, rank] (transposed: [rank, width])."""
    tokens = len(y)
    rp = power_of_two(rank, 16)
    bt, bc, warps, stages, wanted = _rows_tile(rp, tokens)
    starts, stops, offsets, _ = _places(columns, bc)
    widest = max(stop - start for start, stop in columns)
    programs = triton.cdiv(tokens, bt) * len(columns)
    splits = max(1, min(triton.cdiv(widest, 4 * bc), triton.cdiv(wanted, programs)))
    per_split = triton.cdiv(triton.cdiv(widest, splits), bc) * bc
    splits = triton.cdiv(widest, per_split)
    if out is None:
        out = torch.empty(tokens, rank * len(columns), dtype=y.dtype, device=y.device)
    assert out.is_contiguous()
    parts = out if splits == 1 else torch.empty(splits, *out.shape, dtype=torch.float32, device=y.device)
    strides = (1, weight.stride(0)) if transposed else (weight.stride(0), 1)
    _rows[(triton.cdiv(tokens, bt), len(columns), splits)](
        y, weight, parts, tail, tokens, per_split, y.stride(0), *strides, out.numel(), out.stride(0),
        tail.stride(0) if tail is not None else 0, scale, *starts, *stops, *offsets, R=rank, RP=rp,
        TAIL=tail is not None and splits == 1, BT=bt, BC=bc, PRECISION=_precision(y), num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _add_up(parts, out, add=False, tail=tail)
    if tail is not None and tail.shape[1] > out.shape[1]:
        tail[:, out.shape[1] :].zero_()
    return out


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
) -> torch.Tensor:
    """`sum_columns_` into total and `rows` of the same y, read once."""
    assert total.is_contiguous() and weight.stride(1) == 1
    tokens, rp = len(y), power_of_two(rank, 16)
    bc, bt, warps, stages, programs = _both_tile(rp, tokens)
    starts, stops, offsets, counts = _places(columns, bc)
    blocks, members = sum(counts), counts[: len(columns)]
    splits = max(1, min(triton.cdiv(tokens, 4 * bt), triton.cdiv(programs, blocks)))
    per_split = triton.cdiv(triton.cdiv(tokens, splits), bt) * bt
    splits = triton.cdiv(tokens, per_split)
    sums = total if splits == 1 else torch.empty(splits, *total.shape, dtype=torch.float32, device=y.device)
    parts = torch.empty(max(members), tokens, rank * len(columns), dtype=torch.float32, device=y.device)
    g = torch.empty(parts.shape[1:], dtype=y.dtype, device=y.device)
    _both[(blocks, splits)](
        y, h, weight, parts, sums, tokens, per_split, y.stride(0), h.stride(0), weight.stride(0), g.numel(),
        total.numel(), scale, *starts, *stops, *offsets, *counts, WIDTH=g.shape[1], R=rank, RP=rp, BT=bt, BC=bc,
        ADD=splits == 1, PRECISION=_precision(y), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    _add_up(parts, g, add=False, tail=tail, counts=members)
    if splits > 1:
        _add_up(sums, total, add=True)
    if tail is not None and tail.shape[1] > g.shape[1]:
        tail[:, g.shape[1] :].zero_()
    return g


def _both_tile(rank: int, tokens: int) -> tuple[int, int, int, int, int]:
    """Columns and tokens of a tile, warps, stages, programs wanted."""
    if rank > 32:
        return 128, 64, 4, 3, 264
    return (256, 64, 4, 3, 264) if tokens >= 2048 else (128, 128, 4, 3, 264)


def _add_up(
    parts: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    tail: torch.Tensor | None = None,
    counts: list[int] | None = None,
) -> None:
    """out (contiguous) (+)= the sum over the first dimension of `parts`; written to `tail`'s columns as well. `counts`:
    members, whose columns lie side by side, have that many parts and the rest of theirs was never written. A last
    program of the product itself doing this was tried: no launch more, but slower (6.8 against 5.6 microseconds)."""
    n, many, width = out.numel(), power_of_two(parts.shape[0]), out.shape[-1]
    block = min(1024, max(32, 4096 // many), max(32, power_of_two(n // 256)))  # enough programs for the chip
    each = [*counts, 0, 0][:3] if counts else [len(parts)] * 3
    _add[(triton.cdiv(n, block),)](
        parts, out, tail, n, width, width // len(counts or [1]), *each, tail.stride(0) if tail is not None else 0,
        ADD=add, TAIL=tail is not None, MEMBERS=counts is not None and len(set(counts)) > 1, P=many, B=block,
        num_warps=4 if many * block >= 1024 else 1,
    )  # fmt: skip


def _precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _places(columns: tuple[tuple[int, int], ...], block: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Starts, stops, rows of the stacked weight and numbers of blocks, for three members whatever there are."""
    starts, stops, offsets, counts, row = [], [], [], [], 0
    for start, stop in columns:
        starts.append(start)
        stops.append(stop)
        offsets.append(row)
        counts.append(triton.cdiv(stop - start, block))
        row += stop - start
    spare = [0] * (3 - len(columns))
    return starts + spare, stops + spare, offsets + spare, counts + spare
