"""The thin products of adapters: one side is a few dozen wide, so they cost what reading the other side costs.

`rows` reads a wide [T, C] once and leaves [T, R] a member; what is summed over tokens instead is in sums.py. Where the
grid would be too small for the chip, the sum is split, the parts are written aside in fp32 and added in a fixed order
(`add_up`): the same bits every time, which atomics would not give.

`tile_product` and `sum_of_parts` are what a kernel needs that writes the product elsewhere too (kernels/fp8/thin.py).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graftune.kernels import launch

MOST = 2**31 - 1024  # values of a thin product: its last block counts beyond them


@triton.jit
def of_member(member, values):
    """This member's value of a tuple that has one for each. A tuple's values are parameters of the launch, whose
    divisibility the compiler knows: a table in memory would cost a load before the first tile, and wide loads."""
    found = values[0]
    for index in tl.static_range(1, len(values)):
        found = tl.where(member == index, values[index], found)
    return found


@triton.jit
def tile_product(
    y_ptr, w_ptr, at, alive, start, width, row, first, per_split, y_stride, w_c, w_r,
    R: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BT, RP]: the sum over `per_split` columns c from `first` on, of the `width` ones of a member that begin at
    `start`, of y[t, c] w[c, r] for the tokens `at`. y may be narrower than w."""
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
    """The values `at` of n, summed over their parts, always in the same order; each member has its own number of
    them."""
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
    at = tl.program_id(0) * B + tl.arange(0, B)  # 32 bits: dividing is what this costs
    total = sum_of_parts(parts_ptr, at, n, width, rank, counts, P)
    if ADD:
        total += tl.load(out_ptr + at, at < n, other=0.0)
    total = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, total, at < n)
    if TAIL:
        tl.store(tail_ptr + (at // width).to(tl.int64) * tail_stride + at % width, total, at < n)


class Tiles(NamedTuple):
    """How a thin product is cut up."""

    tokens: int  # of a tile
    columns: int
    warps: int
    stages: int
    splits: int  # of the columns
    per_split: int


def tiles_of(tokens: int, columns: tuple[tuple[int, int], ...], tile: tuple[int, int, int, int, int]) -> Tiles:
    """`tile`: tokens and columns of a tile, warps, stages, programs wanted."""
    bt, bc, warps, stages, wanted = tile
    widest = max(stop - start for start, stop in columns)
    programs = triton.cdiv(tokens, bt) * len(columns)
    splits = max(1, min(triton.cdiv(widest, 4 * bc), triton.cdiv(wanted, programs)))
    per_split = triton.cdiv(triton.cdiv(widest, splits), bc) * bc
    return Tiles(bt, bc, warps, stages, triton.cdiv(widest, per_split), per_split)


def _rows_tile(tokens: int) -> tuple[int, int, int, int, int]:
    """Tokens and columns of a tile, warps, stages, programs wanted."""
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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, rank * members] = scale * y[:, columns] weight; weight [sum of widths, rank] (transposed: [rank, width])."""
    tokens = len(y)
    bt, bc, warps, stages, splits, per_split = tiles_of(tokens, columns, _rows_tile(tokens))
    starts, stops, offsets, _ = places(columns, bc)
    if out is None:
        out = torch.empty(tokens, rank * len(columns), dtype=weight.dtype, device=y.device)
    assert out.is_contiguous()
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
    """How parts are added up: their number, a power of two that holds it, values of a program, its warps."""

    counts: tuple[int, ...]
    many: int
    block: int
    warps: int


def adding(parts: torch.Tensor, counts: tuple[int, ...] | None) -> Adding:
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
    """out (contiguous) (+)= the sum over the first dimension of `parts`; written to `tail`'s columns as well. `counts`:
    members, whose columns lie side by side, have that many parts and the rest of theirs was never written. A last
    program of the product itself doing this was tried: no launch more, but slower (6.8 against 5.6 microseconds)."""
    n, width = out.numel(), out.shape[-1]
    each, many, block, warps = adding(parts, counts)
    _add[(triton.cdiv(n, block),)](
        parts, out, tail, n, width, width // len(each), each, tail.stride(0) if tail is not None else 0, ADD=add,
        TAIL=tail is not None, P=many, B=block, num_warps=warps,
    )  # fmt: skip


def clear(thin: int, tail: torch.Tensor | None) -> None:
    """What is behind the thin product becomes zero."""
    if tail is not None and tail.shape[1] > thin:
        tail[:, thin:].zero_()


def precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


class Places(NamedTuple):
    """Where the members of a group lie, as tuples that kernels take: one value for each member."""

    starts: tuple[int, ...]  # first columns of the wide side
    stops: tuple[int, ...]  # behind the last ones
    offsets: tuple[int, ...]  # first rows of the stacked weight
    counts: tuple[int, ...]  # blocks of columns


def places(columns: tuple[tuple[int, int], ...], block: int) -> Places:
    widths = [stop - start for start, stop in columns]
    starts, stops = zip(*columns, strict=True)
    return Places(
        starts, stops, (0, *itertools.accumulate(widths[:-1])), tuple(triton.cdiv(width, block) for width in widths)
    )
