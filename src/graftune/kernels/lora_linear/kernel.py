"""The thin products of adapters: one side is a few dozen wide, so they cost what reading the other side costs.

`rows` reads a wide [T, C] once and leaves [T, R] a member; what is summed over tokens instead is in sums.py. Where the
grid would be too small for the chip, the sum is split, the parts are written aside in fp32 and added in a fixed order
(`add_up`): the same bits every time, which atomics would not give.

Beside a weight in fp8 the thin products also go behind the 8-bit rows that the product reads (`Codes`). The switch is a
constant of the compilation; without codes, nothing of it is there.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graftune.kernels import launch

PIECES = 3  # columns of codes that one of a thin product takes
MOST = 2**31 - 1024  # values of a thin product: its last block counts beyond them


class Codes(NamedTuple):
    """8-bit rows to be filled, as kernels/fp8/reference.py has them."""

    rows: torch.Tensor  # [T, width + room]: what the product leaves goes behind the first `width` columns
    width: int
    scale: torch.Tensor  # [T] fp32, by which a row is divided
    shift: torch.Tensor  # 0-dim fp32, by which the thin product is multiplied besides

    @property
    def tail(self) -> torch.Tensor:
        return self.rows[:, self.width :]


@triton.jit
def beyond_code(value):
    """What the e4m3 code of a value (4 significant bits, or multiples of 2^-9; at most 448) leaves of it. Converting
    the code back would say the same, but of four codes packed into a word ptxas 12.8 then takes two from a register
    that nothing wrote. Adding 1.5 * 2^23 quanta rounds to whole quanta, and taking them away again is exact."""
    near = tl.minimum(tl.maximum(value, -448.0), 448.0)
    power = tl.maximum(near.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23).to(tl.float32, bitcast=True)
    quanta = power * (1.5 * 1048576.0)
    return value - ((near + quanta) - quanta)


@triton.jit
def lay_pieces(value, place, distance, mask, kind: tl.constexpr):
    """hi, hi and lo of values that are divided by their row's scale already."""
    hi = value.to(kind)
    lo = beyond_code(value).to(kind)
    tl.store(place, hi, mask)
    tl.store(place + distance, hi, mask)
    tl.store(place + 2 * distance, lo, mask)


@triton.jit
def of_member(member, values):
    """This member's value of a tuple that has one for each. A tuple's values are parameters of the launch, whose
    divisibility the compiler knows: a table in memory would cost a load before the first tile, and wide loads."""
    found = values[0]
    for index in tl.static_range(1, len(values)):
        found = tl.where(member == index, values[index], found)
    return found


@launch.kernel
def _rows(
    y_ptr, w_ptr, out_ptr, tail_ptr, row_scale_ptr, code_scale_ptr, shift_ptr,
    tokens, per_split, y_stride, w_c, w_r, split_stride, out_stride, tail_stride, scale,
    starts, stops, offsets, R: tl.constexpr, RP: tl.constexpr,
    ROWS: tl.constexpr, TAIL: tl.constexpr, LAY: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[t, member * R + r] = scale * sum over the member's columns c of y[t, c] w[c, r]. ROWS: y are codes, each
    row with a scale. LAY: the result goes to the tail as codes."""
    member = tl.program_id(1)
    start, stop, row = of_member(member, starts), of_member(member, stops), of_member(member, offsets)
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
        acc = tl.dot(y.to(w.dtype), w, acc, input_precision=PRECISION)
    acc *= scale
    if ROWS:
        acc *= tl.load(row_scale_ptr + at, alive, other=0.0)[:, None]
    part = out_ptr + split.to(tl.int64) * split_stride
    where = part + at[:, None].to(tl.int64) * out_stride + member * R + ranks[None, :]
    value = acc.to(out_ptr.dtype.element_ty)
    mask = alive[:, None] & (ranks < R)[None, :]
    tl.store(where, value, mask)
    if TAIL:
        tl.store(tail_ptr + at[:, None].to(tl.int64) * tail_stride + member * R + ranks[None, :], value, mask)
    if LAY:
        place = tail_ptr + at[:, None].to(tl.int64) * tail_stride + member * R + ranks[None, :]
        inverse = tl.div_rn(1.0, tl.load(code_scale_ptr + at, alive, other=1.0))
        share = value.to(tl.float32) * (inverse * tl.load(shift_ptr))[:, None]
        lay_pieces(share, place, out_stride, mask, tail_ptr.dtype.element_ty)


@launch.kernel
def _add(
    parts_ptr, out_ptr, tail_ptr, code_scale_ptr, shift_ptr, n, width, rank, counts, tail_stride,
    ADD: tl.constexpr, TAIL: tl.constexpr, LAY: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out (+)= the sum of the parts, always in the same order; each member has its own number of them."""
    at = tl.program_id(0) * B + tl.arange(0, B)  # 32 bits: dividing is what this costs
    each = tl.arange(0, P)[:, None]
    mask = (at < n)[None, :] & (each < counts[0])
    if len(counts) > 1:
        mask = (at < n)[None, :] & (each < of_member(at % width // rank, counts)[None, :])
    total = tl.sum(tl.load(parts_ptr + each.to(tl.int64) * n + at[None, :], mask, other=0.0), 0)
    if ADD:
        total += tl.load(out_ptr + at, at < n, other=0.0)
    total = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, total, at < n)
    if TAIL:
        tl.store(tail_ptr + (at // width).to(tl.int64) * tail_stride + at % width, total, at < n)
    if LAY:
        inverse = tl.div_rn(1.0, tl.load(code_scale_ptr + at // width, at < n, other=1.0)) * tl.load(shift_ptr)
        place = tail_ptr + (at // width).to(tl.int64) * tail_stride + at % width
        lay_pieces(total.to(tl.float32) * inverse, place, width, at < n, tail_ptr.dtype.element_ty)


def _rows_tile(tokens: int, codes: bool) -> tuple[int, int, int, int, int]:
    """Tokens and columns of a tile, warps, stages, programs wanted. Codes become numbers on their way, for which the
    multiprocessors want more programs."""
    if tokens < 4096:
        return 64, 64, 4, 4, 256
    return (64, 128, 4, 3, 264) if codes else (64, 128, 8, 4, 128)


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
    codes: Codes | None = None,
    row_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, rank * members] = scale * y[:, columns] weight; weight [sum of widths, rank] (transposed: [rank, width]).
    Where y are codes, `row_scale` [T] says of what."""
    assert tail is None or codes is None
    tokens = len(y)
    rp = launch.power_of_two(rank, 16)
    bt, bc, warps, stages, wanted = _rows_tile(tokens, row_scale is not None)
    starts, stops, offsets, _ = places(columns, bc)
    widest = max(stop - start for start, stop in columns)
    programs = triton.cdiv(tokens, bt) * len(columns)
    splits = max(1, min(triton.cdiv(widest, 4 * bc), triton.cdiv(wanted, programs)))
    per_split = triton.cdiv(triton.cdiv(widest, splits), bc) * bc
    splits = triton.cdiv(widest, per_split)
    if out is None:
        out = torch.empty(tokens, rank * len(columns), dtype=weight.dtype, device=y.device)
    assert out.is_contiguous()
    parts = out if splits == 1 else torch.empty(splits, *out.shape, dtype=torch.float32, device=y.device)
    strides = (1, weight.stride(0)) if transposed else (weight.stride(0), 1)
    code_scale, shift = given(codes)
    behind = tail if codes is None else codes.tail
    _rows[(triton.cdiv(tokens, bt), len(columns), splits)](
        y, weight, parts, behind, row_scale, code_scale, shift, tokens, per_split, y.stride(0), *strides, out.numel(),
        out.stride(0), behind.stride(0) if behind is not None else 0, scale, starts, stops, offsets, R=rank, RP=rp,
        ROWS=row_scale is not None, TAIL=tail is not None and splits == 1, LAY=codes is not None and splits == 1,
        BT=bt, BC=bc, PRECISION=precision(weight), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        add_up(parts, out, add=False, tail=tail, codes=codes)
    clear(out.shape[1], tail, codes)
    return out


def add_up(
    parts: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    tail: torch.Tensor | None = None,
    counts: tuple[int, ...] | None = None,
    codes: Codes | None = None,
) -> None:
    """out (contiguous) (+)= the sum over the first dimension of `parts`; written to `tail`'s columns as well. `counts`:
    members, whose columns lie side by side, have that many parts and the rest of theirs was never written. A last
    program of the product itself doing this was tried: no launch more, but slower (6.8 against 5.6 microseconds)."""
    n, many, width = out.numel(), launch.power_of_two(parts.shape[0]), out.shape[-1]
    assert n <= MOST, "the kernel counts in 32 bits"
    block = min(1024, max(32, 4096 // many), max(32, launch.power_of_two(n // 256)))  # enough programs for the chip
    differ = counts is not None and len(set(counts)) > 1
    each = counts if counts is not None and differ else (len(parts),)
    scale, shift = given(codes)
    behind = tail if codes is None else codes.tail
    _add[(triton.cdiv(n, block),)](
        parts, out, behind, scale, shift, n, width, width // len(each), each,
        behind.stride(0) if behind is not None else 0, ADD=add, TAIL=tail is not None, LAY=codes is not None,
        P=many, B=block, num_warps=4 if many * block >= 1024 else 1,
    )  # fmt: skip


def given(codes: Codes | None) -> tuple[torch.Tensor | None, ...]:
    """(scale, shift) for a kernel, neither where there are no codes."""
    return (None, None) if codes is None else (codes.scale, codes.shift)


def clear(thin: int, tail: torch.Tensor | None, codes: Codes | None) -> None:
    """What is behind the thin product becomes zero."""
    if codes is not None:
        tail, thin = codes.tail.view(torch.uint8), PIECES * thin
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
