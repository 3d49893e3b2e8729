"""Codes on the GPU: rows quantised in one reading, codes transposed at memory bandwidth, adapters laid beside them.

A row lies in the registers of one program, so its largest value and its codes come of one reading; rows of more than
`ONE` values are read twice. Bytes are transposed four by four: words are loaded, bytes are exchanged between the words
of four rows in registers, and what goes through shared memory is whole words, which moving bytes singly would not be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from graftune.kernels.fp8.reference import HEADROOM, LARGEST, MOST_Q, PIECES, SMALLEST, Share
from graftune.kernels.launch import power_of_two
from graftune.kernels.lora_linear.reference import members

ONE = 1 << 15  # values of a row that one program holds
TILE = (64, 64)  # words of a tile that is transposed: this many fours of rows, this many words of each
PIECE = 2048  # values that one program of `settle` lays


@triton.jit
def scale_of(most, square, reach_ptr, slack, REACH: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    """reference.scale_of, given the largest value and the sum of squares."""
    if REACH:
        most = tl.maximum(most, tl.load(reach_ptr) * slack * tl.sqrt(square))
    return tl.maximum(most * (1.0 / LARGEST), SMALLEST)


@triton.jit
def _load(x_ptr, factor_ptr, cols, K, FACTOR: tl.constexpr):
    x = tl.load(x_ptr + cols, cols < K, other=0.0).to(tl.float32)
    if FACTOR:
        x *= tl.load(factor_ptr + cols, cols < K, other=0.0)
    return x


@triton.jit
def _quantise(
    x_ptr, factor_ptr, reach_ptr, codes_ptr, scale_ptr, K, x_stride, codes_stride, slack,
    FACTOR: tl.constexpr, REACH: tl.constexpr, WHOLE: tl.constexpr, B: tl.constexpr,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    codes_ptr += row * codes_stride
    cols = tl.arange(0, B)
    kind = codes_ptr.dtype.element_ty
    if WHOLE:
        x = _load(x_ptr, factor_ptr, cols, K, FACTOR)
        square = tl.sum(x * x, 0) if REACH else 0.0
        scale = scale_of(tl.max(tl.abs(x), 0), square, reach_ptr, slack, REACH, LARGEST, SMALLEST)
        tl.store(codes_ptr + cols, (x * tl.div_rn(1.0, scale)).to(kind), cols < K)
    else:
        most, total = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
        for start in range(0, K, B):
            x = _load(x_ptr, factor_ptr, start + cols, K, FACTOR)
            most = tl.maximum(most, tl.abs(x))
            total += x * x
        scale = scale_of(tl.max(most, 0), tl.sum(total, 0), reach_ptr, slack, REACH, LARGEST, SMALLEST)
        inverse = tl.div_rn(1.0, scale)
        for start in range(0, K, B):
            x = _load(x_ptr, factor_ptr, start + cols, K, FACTOR)
            tl.store(codes_ptr + start + cols, (x * inverse).to(kind), start + cols < K)
    tl.store(scale_ptr + row, scale)


@triton.jit
def lay_pieces(value, place, distance, mask, kind: tl.constexpr):
    """hi, hi and lo of values that are divided by their row's scale already."""
    hi = value.to(kind)
    lo = (value - hi.to(tl.float32)).to(kind)
    tl.store(place, hi, mask)
    tl.store(place + distance, hi, mask)
    tl.store(place + 2 * distance, lo, mask)


@triton.jit
def _lay(h_ptr, scale_ptr, shift_ptr, tail_ptr, count, N, h_stride, tail_stride, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    row, col = at // N, at % N
    value = tl.load(h_ptr + row.to(tl.int64) * h_stride + col, at < count, other=0.0).to(tl.float32)
    inverse = tl.div_rn(1.0, tl.load(scale_ptr + row, at < count, other=1.0)) * tl.load(shift_ptr)
    place = tail_ptr + row.to(tl.int64) * tail_stride + col
    lay_pieces(value * inverse, place, N, at < count, tail_ptr.dtype.element_ty)


@triton.jit
def _transpose(codes_ptr, out_ptr, fours, words, stride, out_stride, BF: tl.constexpr, BW: tl.constexpr):
    """Words [4 fours, words] -> words [4 words, fours]; strides count words."""
    four = tl.program_id(0) * BF + tl.arange(0, BF)
    word = tl.program_id(1) * BW + tl.arange(0, BW)
    mask = (four < fours)[:, None] & (word < words)[None, :]
    place = codes_ptr + four.to(tl.int64)[:, None] * (4 * stride) + word[None, :]
    a, b = tl.load(place, mask, other=0), tl.load(place + stride, mask, other=0)
    c, d = tl.load(place + 2 * stride, mask, other=0), tl.load(place + 3 * stride, mask, other=0)
    target = out_ptr + word.to(tl.int64)[:, None] * (4 * out_stride) + four[None, :]
    turned = (word < words)[:, None] & (four < fours)[None, :]
    for i in tl.static_range(4):
        low = ((a >> (8 * i)) & 255) | (((b >> (8 * i)) & 255) << 8)
        high = (((c >> (8 * i)) & 255) << 16) | (((d >> (8 * i)) & 255) << 24)
        tl.store(target + i * out_stride, tl.trans(low | high), turned)


@triton.jit
def _measure(a_type_ptr, table_ptr, alpha_ptr, stats_ptr, B: tl.constexpr):
    """Of one rank of one share: |A_r|^2, max |A_r|, and the same of the column of u = s B / scale.
    Table: [A_r's address, its width, the address of B's first value, rows, distance, the scales' address]."""
    row = table_ptr + tl.program_id(0) * 6
    a_ptr = tl.load(row).to(tl.pointer_type(a_type_ptr.dtype.element_ty))
    u_ptr = tl.load(row + 2).to(tl.pointer_type(a_type_ptr.dtype.element_ty))
    scale_ptr = tl.load(row + 5).to(tl.pointer_type(tl.float32))
    width, rows, distance = tl.load(row + 1).to(tl.int32), tl.load(row + 3).to(tl.int32), tl.load(row + 4)
    square, most = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
    for start in range(0, width, B):
        at = start + tl.arange(0, B)
        a = tl.load(a_ptr + at, at < width, other=0.0).to(tl.float32)
        square += a * a
        most = tl.maximum(most, tl.abs(a))
    tl.store(stats_ptr + tl.program_id(0) * 4, tl.sum(square, 0))
    tl.store(stats_ptr + tl.program_id(0) * 4 + 1, tl.max(most, 0))
    square, most = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
    alpha = tl.load(alpha_ptr + tl.program_id(0))
    for start in range(0, rows, B):
        at = start + tl.arange(0, B)
        u = tl.load(u_ptr + at * distance, at < rows, other=0.0).to(tl.float32)
        u *= tl.div_rn(alpha, tl.load(scale_ptr + at, at < rows, other=1.0))
        square += u * u
        most = tl.maximum(most, tl.abs(u))
    tl.store(stats_ptr + tl.program_id(0) * 4 + 2, tl.sum(square, 0))
    tl.store(stats_ptr + tl.program_id(0) * 4 + 3, tl.max(most, 0))


@triton.jit
def _power(x, MOST_Q: tl.constexpr):
    x = tl.minimum(tl.maximum(x, 1.0 / MOST_Q), MOST_Q)
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _figures(
    stats_ptr, table_ptr, B: tl.constexpr, LARGEST: tl.constexpr, HEADROOM: tl.constexpr, MOST_Q: tl.constexpr
):
    """Table: [first row of the stats, rows, address of the figures]."""
    row = table_ptr + tl.program_id(0) * 3
    first, count = tl.load(row), tl.load(row + 1).to(tl.int32)
    target = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    a_square, a_most = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
    u_square, u_most = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
    for start in range(0, count, B):
        at = start + tl.arange(0, B)
        place = stats_ptr + (first + at) * 4
        a_square = tl.maximum(a_square, tl.load(place, at < count, other=0.0))
        a_most = tl.maximum(a_most, tl.load(place + 1, at < count, other=0.0))
        u_square = tl.maximum(u_square, tl.load(place + 2, at < count, other=0.0))
        u_most = tl.maximum(u_most, tl.load(place + 3, at < count, other=0.0))
    a_length, u_length = tl.sqrt(tl.max(a_square, 0)), tl.sqrt(tl.max(u_square, 0))
    tiny = 1e-30  # nothing divides by zero; the other bound decides then
    q = _power(tl.minimum(LARGEST / tl.maximum(tl.max(u_most, 0), tiny), HEADROOM * a_length), MOST_Q)
    p = _power(tl.minimum(LARGEST / tl.maximum(tl.max(a_most, 0), tiny), HEADROOM * u_length), MOST_Q)
    tl.store(target, a_length / q)
    tl.store(target + 1, 1.0 / q)
    tl.store(target + 2, u_length / p)
    tl.store(target + 3, 1.0 / p)


@triton.jit
def _settle(a_type_ptr, code_type_ptr, table_ptr, alpha_ptr, B: tl.constexpr):
    """One piece of a matrix [rows, width] as codes: hi, lo and hi, a distance apart. Table: [source's address, values,
    width, target's address, distance of rows, of columns, of codes, the scales' address or 0, the shift's, first]."""
    row = table_ptr + tl.program_id(0) * 10
    source = tl.load(row).to(tl.pointer_type(a_type_ptr.dtype.element_ty))
    target = tl.load(row + 3).to(tl.pointer_type(code_type_ptr.dtype.element_ty))
    count, width = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    stride, step, distance, scales = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    shift = tl.load(tl.load(row + 8).to(tl.pointer_type(tl.float32)))
    at = tl.load(row + 9).to(tl.int32) + tl.arange(0, B)
    mask = at < count
    line, col = at // width, at % width
    value = tl.load(source + at, mask, other=0.0).to(tl.float32)
    scaled = mask & (scales + tl.zeros([B], tl.int64) != 0)
    scale = tl.load(scales.to(tl.pointer_type(tl.float32)) + line, scaled, other=1.0)
    value = value * tl.div_rn(tl.load(alpha_ptr + tl.program_id(0)), scale) * tl.div_rn(1.0, shift)
    kind = code_type_ptr.dtype.element_ty
    hi = value.to(kind)
    place = target + line * stride + col * step
    tl.store(place, hi, mask)
    tl.store(place + distance, (value - hi.to(tl.float32)).to(kind), mask)
    tl.store(place + 2 * distance, hi, mask)


def warps(width: int) -> int:
    """Of a program that holds a row."""
    return min(32, max(1, power_of_two(width) // 1024))


def quantise(
    x: torch.Tensor, codes: torch.Tensor, factor: torch.Tensor | None, reach: torch.Tensor | None, slack: float
) -> torch.Tensor:
    tokens, width = x.shape
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    block = min(ONE, power_of_two(width))
    if tokens:
        _quantise[(tokens,)](
            x, factor, reach, codes, scale, width, x.stride(0), codes.stride(0), slack, FACTOR=factor is not None,
            REACH=reach is not None, WHOLE=width <= block, B=block, LARGEST=LARGEST, SMALLEST=SMALLEST,
            num_warps=warps(block),
        )  # fmt: skip
    return scale


def lay(h: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, tail: torch.Tensor) -> None:
    count, block = h.numel(), 1024
    if count:
        _lay[(triton.cdiv(count, block),)](
            h, scale, shift, tail, count, h.shape[1], h.stride(0), tail.stride(0), B=block, num_warps=4
        )
    if tail.shape[1] > PIECES * h.shape[1]:
        tail[:, PIECES * h.shape[1] :].view(torch.uint8).zero_()


def transpose(codes: torch.Tensor, out: torch.Tensor, tile: tuple[int, int] = TILE, num_warps: int = 8) -> None:
    a, b = _words(codes), _words(out)
    fours, words = len(a) // 4, a.shape[1]
    _transpose[(triton.cdiv(fours, tile[0]), triton.cdiv(words, tile[1]))](
        a, b, fours, words, a.stride(0), b.stride(0), BF=tile[0], BW=tile[1], num_warps=num_warps
    )


def _words(codes: torch.Tensor) -> torch.Tensor:
    """The same memory as words of four codes: [rows, columns / 4]."""
    return codes.view(torch.uint8).view(torch.int32)


def settle(shares: Sequence[Share], tables: dict[str, torch.Tensor]) -> None:
    """All shares in three launches, whose tables are made at the first call: not while capturing."""
    if "fp8.ranks" not in tables:
        _make_tables(shares, tables)
    kinds = shares[0].down, shares[0].beside
    stats = tables["fp8.stats"]
    _measure[(len(stats),)](kinds[0], tables["fp8.ranks"], tables["fp8.rank_alpha"], stats, B=1024, num_warps=4)
    _figures[(len(shares),)](
        stats, tables["fp8.shares"], B=64, LARGEST=LARGEST, HEADROOM=HEADROOM, MOST_Q=MOST_Q, num_warps=1
    )
    pieces = tables["fp8.pieces"]
    _settle[(len(pieces),)](*kinds, pieces, tables["fp8.piece_alpha"], B=PIECE, num_warps=4)


def _make_tables(shares: Sequence[Share], tables: dict[str, torch.Tensor]) -> None:
    ranks: list[tuple[int, ...]] = []
    lines: list[tuple[int, ...]] = []
    pieces: list[tuple[int, ...]] = []
    rank_alpha: list[float] = []
    piece_alpha: list[float] = []

    def lay_out(
        source: torch.Tensor, target: torch.Tensor, distance: int, scale: torch.Tensor | None, shift: torch.Tensor,
        alpha: float,
    ) -> None:  # fmt: skip
        for first in range(0, source.numel(), PIECE):
            pieces.append((
                source.data_ptr(), source.numel(), source.shape[1], target.data_ptr(), *target.stride(), distance,
                scale.data_ptr() if scale is not None else 0, shift.data_ptr(), first,
            ))  # fmt: skip
            piece_alpha.append(alpha)

    for share in shares:
        assert share.down.is_contiguous() and share.up.is_contiguous() and share.scale.is_contiguous()
        n, into = share.down.shape
        rank = share.up.shape[1]
        lines.append((len(ranks), n, share.figures.data_ptr()))
        for columns, rows, place in members(share.columns, rank):
            up, scale = share.up[rows], share.scale[columns]
            for r in range(rank):
                down = share.down[place.start + r]
                ranks.append((down.data_ptr(), into, up[:, r].data_ptr(), len(up), rank, scale.data_ptr()))
                rank_alpha.append(share.alpha)
            beside = share.beside[columns, place.start :]
            lay_out(up, beside, n * beside.stride(1), scale, share.figures[1], share.alpha)
        lay_out(share.down, share.below, n * share.below.stride(0), None, share.figures[3], 1.0)
    device = shares[0].down.device
    tables["fp8.ranks"] = torch.tensor(ranks, dtype=torch.int64).to(device)
    tables["fp8.shares"] = torch.tensor(lines, dtype=torch.int64).to(device)
    tables["fp8.pieces"] = torch.tensor(pieces, dtype=torch.int64).to(device)
    tables["fp8.rank_alpha"] = torch.tensor(rank_alpha, dtype=torch.float32).to(device)
    tables["fp8.piece_alpha"] = torch.tensor(piece_alpha, dtype=torch.float32).to(device)
    tables["fp8.stats"] = torch.empty(len(ranks), 4, dtype=torch.float32, device=device)
