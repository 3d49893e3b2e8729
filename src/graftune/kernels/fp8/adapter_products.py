# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""The thin products of adapters beside FP8 weights: those of lora_linear, which also write their results as codes after
the rows that the weight's product reads, so that nothing is read once more to quantise it.

Where y itself is stored as codes, the adapters read the codes that the weight reads: half as many bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.fp8.reference import PIECES
from graftune.kernels.lora_linear.kernel import (
    adding,
    of_member,
    places,
    precision,
    sum_of_parts,
    tile_product,
    tiles_of,
)


class CodeColumns(NamedTuple):
    """8-bit rows whose last columns a thin product fills (reference.py)."""

    rows: torch.Tensor  # [T, width + adapter columns]: codes of the thin product go after the first `width` columns
    width: int
    scale: torch.Tensor  # [T] fp32, by which a row is divided
    shift: torch.Tensor  # 0-dim fp32, a further factor of the thin product

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


@launch.kernel
def _rows(
    y_ptr, w_ptr, out_ptr, tail_ptr, row_scale_ptr, code_scale_ptr, shift_ptr,
    tokens, per_split, y_stride, w_c, w_r, split_stride, out_stride, tail_stride, scale,
    starts, stops, offsets, R: tl.constexpr, RP: tl.constexpr, ROWS: tl.constexpr, LAY: tl.constexpr,
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
    acc = tile_product(
        y_ptr, w_ptr, at, alive, start, stop - start, row, split * per_split, per_split, y_stride, w_c, w_r,
        R, RP, BT, BC, PRECISION,
    )  # fmt: skip
    acc *= scale
    if ROWS:
        acc *= tl.load(row_scale_ptr + at, alive, other=0.0)[:, None]
    part = out_ptr + split.to(tl.int64) * split_stride
    where = part + at[:, None].to(tl.int64) * out_stride + member * R + ranks[None, :]
    value = acc.to(out_ptr.dtype.element_ty)
    mask = alive[:, None] & (ranks < R)[None, :]
    tl.store(where, value, mask)
    if LAY:
        place = tail_ptr + at[:, None].to(tl.int64) * tail_stride + member * R + ranks[None, :]
        inverse = tl.div_rn(1.0, tl.load(code_scale_ptr + at, alive, other=1.0))
        share = value.to(tl.float32) * (inverse * tl.load(shift_ptr))[:, None]
        lay_pieces(share, place, out_stride, mask, tail_ptr.dtype.element_ty)


@launch.kernel
def _add(
    parts_ptr, out_ptr, tail_ptr, code_scale_ptr, shift_ptr, n, width, rank, counts, tail_stride,
    P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out = the sum of the parts, which goes to the tail as codes."""
    at = tl.program_id(0) * B + tl.arange(0, B)  # 32 bits: dividing is what this costs
    total = sum_of_parts(parts_ptr, at, n, width, rank, counts, P).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, total, at < n)
    inverse = tl.div_rn(1.0, tl.load(code_scale_ptr + at // width, at < n, other=1.0)) * tl.load(shift_ptr)
    place = tail_ptr + (at // width).to(tl.int64) * tail_stride + at % width
    lay_pieces(total.to(tl.float32) * inverse, place, width, at < n, tail_ptr.dtype.element_ty)


def _tile(tokens: int, codes: bool) -> tuple[int, int, int, int, int]:
    """Tokens and columns of a tile, warps, stages, desired number of programs, which is larger for codes because the
    kernel converts them to numbers."""
    if tokens < 4096:
        return 64, 64, 4, 4, 256
    return (64, 128, 4, 3, 264) if codes else (64, 128, 8, 4, 128)


def rows(
    y: torch.Tensor,
    weight: torch.Tensor,
    columns: tuple[tuple[int, int], ...],
    codes: CodeColumns,
    *,
    rank: int,
    scale: float = 1.0,
    transposed: bool = False,
    row_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, rank * members] = scale * y[:, columns] weight; weight [sum of widths, rank] (transposed: [rank, width]).
    If y is stored as codes, `row_scale` [T] has the scales of its rows."""
    tokens = len(y)
    bt, bc, warps, stages, splits, per_split = tiles_of(tokens, columns, _tile(tokens, row_scale is not None))
    starts, stops, offsets, _ = places(columns, bc)
    out = torch.empty(tokens, rank * len(columns), dtype=weight.dtype, device=y.device)
    parts = out if splits == 1 else torch.empty(splits, *out.shape, dtype=torch.float32, device=y.device)
    strides = (1, weight.stride(0)) if transposed else (weight.stride(0), 1)
    tail = codes.tail
    _rows[(triton.cdiv(tokens, bt), len(columns), splits)](
        y, weight, parts, tail, row_scale, codes.scale, codes.shift, tokens, per_split, y.stride(0), *strides,
        out.numel(), out.stride(0), tail.stride(0), scale, starts, stops, offsets, R=rank,
        RP=launch.power_of_two(rank, 16), ROWS=row_scale is not None, LAY=splits == 1, BT=bt, BC=bc,
        PRECISION=precision(weight), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        add_up(parts, out, codes)
    clear(out.shape[1], codes)
    return out


def add_up(parts: torch.Tensor, out: torch.Tensor, codes: CodeColumns, counts: tuple[int, ...] | None = None) -> None:
    """`add_up` of lora_linear, which overwrites `out` and also writes the sum as codes after the rows of `codes`."""
    n, width = out.numel(), out.shape[-1]
    each, many, block, warps = adding(parts, counts)
    tail = codes.tail
    _add[(triton.cdiv(n, block),)](
        parts, out, tail, codes.scale, codes.shift, n, width, width // len(each), each, tail.stride(0), P=many,
        B=block, num_warps=warps,
    )  # fmt: skip


def clear(thin: int, codes: CodeColumns) -> None:
    """Zeroes the columns after the codes of the thin product."""
    tail = codes.tail.view(torch.uint8)
    if tail.shape[1] > PIECES * thin:
        tail[:, PIECES * thin :].zero_()
