"""The low-rank ("thin") products of adapters: one side has at most 64 columns, so reading the other side is the cost.

`rows` reads a wide [T, C] once and writes [T, R] for each member; products summed over tokens are in sums.py. Where the
grid would have too few programs for the GPU, the sum is split: the parts are written in fp32 to a buffer and added in a
fixed order (`add_up`). Atomics would not give the same bits every time.

kernels/fp8/adapter_products.py builds on `tile_product` and `sum_of_parts`.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graftune.kernels import launch

MOST = 2**31 - 1024  # values of a thin product; offsets in its last block go a little beyond


@triton.jit
def of_member(member, values):
    """Select this member's value from a tuple with one value for each. The values are parameters of the launch, so the
    compiler knows their divisibility; a table in memory would cost a load before the first tile, and vector loads."""
    found = values[0]
    for index in tl.static_range(1, len(values)):
        found = tl.where(member == index, values[index], found)
    return found


@triton.jit
def tile_product(
    y_ptr, w_ptr, at, alive, start, width, row, first, per_split, y_stride, w_c, w_r,
    R: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BT, RP]: for the tokens `at`, the sum of y[t, c] w[c, r] over `per_split` columns c, starting at `first`, of a
    member whose `width` columns start at `start`. y may have a narrower dtype than w."""
    ranks = tl.arange(0, RP)
    acc = tl.zeros([BT, RP], tl.float32)
    for c in range(first, min(first + per_split, width), BC):
        local = c + tl.arange(0, BC)
        inside = local < width
        y = tl.load(
            y_ptr + at[:, None].to(tl.int64) * y_stride + (start + local)[None, :],
            alive[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(
            w_ptr + (row + local)[:, None].to(tl.int64) * w_c + ranks[None, :] * w_r,
            inside[:, None] & (ranks < R)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(y.to(w.dtype), w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def sum_of_parts(parts_ptr, at, n, width, rank, counts, P: tl.constexpr):
    """Sum the parts of the values `at` (of n), always in the same order; members differ in their number of parts."""
    each = tl.arange(0, P)[:, None]
    mask = (at < n)[None, :] & (each < counts[0])
    if len(counts) > 1:
        mask = (at < n)[None, :] & (each < of_member(at % width // rank, counts)[None, :])
    return tl.sum(tl.load(parts_ptr + each.to(tl.int64) * n + at[None, :], mask, other=0.0), 0)


@launch.kernel
def _rows(
    y_ptr, w_ptr, out_ptr, tail_ptr, tokens, per_split, y_stride, w_c, w_r, split_stride, out_stride, tail_stride,
    scale, starts, stops, offsets, R: tl.constexpr, RP: tl.constexpr, TAIL: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[t, member * R + r] = scale * sum over the member's columns c of y[t, c] w[c, r]."""
    member = tl.program_id(1)
    start, stop, row = of_member(member, starts), of_member(member, stops), of_member(member, offsets)
    split = tl.program_id(2)
    at = tl.program_id(0) * BT + tl.arange(0, BT)
    alive = at < tokens
    ranks = tl.arange(0, RP)
    acc = tile_product(
        y_ptr, w_ptr, at, alive, start, stop - start, row, split * per_split, per_split, y_stride, w_c, w_r,
        R, RP, BT, BC, PRECISION,
    )  # fmt: skip
    acc *= scale
    part = out_ptr + split.to(tl.int64) * split_stride
    where = part + at[:, None].to(tl.int64) * out_stride + member * R + ranks[None, :]
    value = acc.to(out_ptr.dtype.element_ty)
    mask = alive[:, None] & (ranks < R)[None, :]
    tl.store(where, value, mask)
    if TAIL:
        tl.store(tail_ptr + at[:, None].to(tl.int64) * tail_stride + member * R + ranks[None, :], value, mask)


@launch.kernel
def _add(
    parts_ptr, out_ptr, tail_ptr, n, width, rank, counts, tail_stride,
    ADD: tl.constexpr, TAIL: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out (+)= the sum of the parts."""
    at = tl.program_id(0) * B + tl.arange(0, B)  # 32 bits: the division dominates the cost
    total = sum_of_parts(parts_ptr, at, n, width, rank, counts, P)
    if ADD:
        total += tl.load(out_ptr + at, at < n, other=0.0)
    total = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, total, at < n)
    if TAIL:
        tl.store(tail_ptr + (at // width).to(tl.int64) * tail_stride + at % width, total, at < n)


class Tiles(NamedTuple):
    """How a thin product is tiled."""

    tokens: int  # per tile
    columns: int  # per tile
    warps: int
    stages: int
    splits: int  # parts that the columns are split into
    per_split: int  # columns per part


def tiles_of(tokens: int, columns: tuple[tuple[int, int], ...], tile: tuple[int, int, int, int, int]) -> Tiles:
    """`tile`: tokens and columns per tile, warps, stages, desired number of programs."""
    bt, bc, warps, stages, wanted = tile
    widest = max(stop - start for start, stop in columns)
    programs = triton.cdiv(tokens, bt) * len(columns)
    splits = max(1, min(triton.cdiv(widest, 4 * bc), triton.cdiv(wanted, programs)))
    per_split = triton.cdiv(triton.cdiv(widest, splits), bc) * bc
    return Tiles(bt, bc, warps, stages, triton.cdiv(widest, per_split), per_split)


def _rows_tile(tokens: int) -> tuple[int, int, int, int, int]:
    """Tokens and columns per tile, warps, stages, desired number of programs."""
    return (64, 64, 4, 4, 256) if tokens < 4096 else (64, 128, 8, 4, 128)


def rows(
    y: torch.Tensor,
    weight: torch.Tensor,
    columns: tuple[tuple[int, int], ...],
    *,
    rank: int,
    scale: float = 1.0,
    transposed: bool = False,
    tail: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, rank * members] = scale * y[:, columns] weight; weight [sum of widths, rank] (transposed: [rank, width])."""
    tokens = len(y)
    bt, bc, warps, stages, splits, per_split = tiles_of(tokens, columns, _rows_tile(tokens))
    starts, stops, offsets, _ = places(columns, bc)
    out = torch.empty(tokens, rank * len(columns), dtype=weight.dtype, device=y.device)
    parts = out if splits == 1 else torch.empty(splits, *out.shape, dtype=torch.float32, device=y.device)
    strides = (1, weight.stride(0)) if transposed else (weight.stride(0), 1)
    _rows[(triton.cdiv(tokens, bt), len(columns), splits)](
        y, weight, parts, tail, tokens, per_split, y.stride(0), *strides, out.numel(), out.stride(0),
        tail.stride(0) if tail is not None else 0, scale, starts, stops, offsets, R=rank,
        RP=launch.power_of_two(rank, 16), TAIL=tail is not None and splits == 1, BT=bt, BC=bc,
        PRECISION=precision(weight), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        add_up(parts, out, add=False, tail=tail)
    clear(out.shape[1], tail)
    return out


class Adding(NamedTuple):
    """How parts are summed."""

    counts: tuple[int, ...]  # parts, of each member or of all
    many: int  # the next power of two
    block: int  # values per program
    warps: int


def adding(parts: torch.Tensor, counts: tuple[int, ...] | None) -> Adding:
    """The launch configuration of a sum over the first dimension of `parts`."""
    n, many = parts[0].numel(), launch.power_of_two(parts.shape[0])
    assert n <= MOST, "the kernel counts in 32 bits"
    block = min(1024, max(32, 4096 // many), max(32, launch.power_of_two(n // 256)))  # enough programs for the chip
    differ = counts is not None and len(set(counts)) > 1
    each = counts if counts is not None and differ else (len(parts),)
    return Adding(each, many, block, 4 if many * block >= 1024 else 1)


def add_up(
    parts: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    tail: torch.Tensor | None = None,
    counts: tuple[int, ...] | None = None,
) -> None:
    """out (contiguous) (+)= the sum over the first dimension of `parts`, also written to `tail`'s columns. `counts`:
    how many parts each member has; its other parts are uninitialised. Letting the product's last program do this
    saves a launch but was slower (6.8 instead of 5.6 microseconds)."""
    n, width = out.numel(), out.shape[-1]
    each, many, block, warps = adding(parts, counts)
    _add[(triton.cdiv(n, block),)](
        parts, out, tail, n, width, width // len(each), each, tail.stride(0) if tail is not None else 0, ADD=add,
        TAIL=tail is not None, P=many, B=block, num_warps=warps,
    )  # fmt: skip


def clear(thin: int, tail: torch.Tensor | None) -> None:
    """Zero the tail's columns after the thin product."""
    if tail is not None and tail.shape[1] > thin:
        tail[:, thin:].zero_()


def precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


class Places(NamedTuple):
    """The positions of a group's members, as tuples for a kernel's parameters: one value for each member."""

    starts: tuple[int, ...]  # first column in the wide matrix
    stops: tuple[int, ...]  # one past the last column
    offsets: tuple[int, ...]  # first row in the stacked weight
    counts: tuple[int, ...]  # blocks of columns


def places(columns: tuple[tuple[int, int], ...], block: int) -> Places:
    widths = [stop - start for start, stop in columns]
    starts, stops = zip(*columns, strict=True)
    return Places(
        starts, stops, (0, *itertools.accumulate(widths[:-1])), tuple(triton.cdiv(width, block) for width in widths)
    )
