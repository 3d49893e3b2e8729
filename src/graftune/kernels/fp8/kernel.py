"""Quantises rows on the GPU in one read, writes thin products as codes beside them, and transposes codes.

One program holds a row in registers, so it computes the largest value and the codes from one read; rows of more than
`ONE` values are read twice. Bytes are transposed four by four, at full bandwidth: words are loaded, bytes are exchanged
between the words of four rows in registers, and only whole words go through shared memory, not single bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.fp8.adapter_products import lay_pieces
from graftune.kernels.fp8.reference import LARGEST, PIECES, SMALLEST

ONE = 1 << 15  # values of a row that one program holds
TILE = (64, 64)  # words of a tile that is transposed: this many fours of rows, this many words of each


@triton.jit
def scale_of(most, square, reach_ptr, slack, REACH: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    """reference.scale_of, given the largest value and the sum of squares."""
    if REACH:
        most = tl.maximum(most, tl.load(reach_ptr) * slack * tl.sqrt(square))
    return tl.maximum(most * (1.0 / LARGEST), SMALLEST)


@triton.jit
def encode_row(
    z, codes_ptr, scale_ptr, cols, inside, reach_ptr, slack, REACH: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):  # fmt: skip
    """Scale and codes of a row that is in the registers whole."""
    square = tl.sum(z * z, 0) if REACH else 0.0
    scale = scale_of(tl.max(tl.abs(z), 0), square, reach_ptr, slack, REACH, LARGEST, SMALLEST)
    tl.store(scale_ptr, scale)
    tl.store(codes_ptr + cols, (z * tl.div_rn(1.0, scale)).to(codes_ptr.dtype.element_ty), inside)


@triton.jit
def _load(x_ptr, factor_ptr, cols, K, FACTOR: tl.constexpr):
    x = tl.load(x_ptr + cols, cols < K, other=0.0).to(tl.float32)
    if FACTOR:
        x *= tl.load(factor_ptr + cols, cols < K, other=0.0)
    return x


@launch.kernel
def _quantise(
    x_ptr, factor_ptr, reach_ptr, codes_ptr, scale_ptr, K, x_stride, codes_stride, slack,
    FACTOR: tl.constexpr, REACH: tl.constexpr, WHOLE: tl.constexpr, B: tl.constexpr,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    codes_ptr += row * codes_stride
    scale_ptr += row
    cols = tl.arange(0, B)
    if WHOLE:
        x = _load(x_ptr, factor_ptr, cols, K, FACTOR)
        encode_row(x, codes_ptr, scale_ptr, cols, cols < K, reach_ptr, slack, REACH, LARGEST, SMALLEST)
    else:
        most, total = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
        for start in range(0, K, B):
            x = _load(x_ptr, factor_ptr, start + cols, K, FACTOR)
            most = tl.maximum(most, tl.abs(x))
            total += x * x
        scale = scale_of(tl.max(most, 0), tl.sum(total, 0), reach_ptr, slack, REACH, LARGEST, SMALLEST)
        tl.store(scale_ptr, scale)
        inverse = tl.div_rn(1.0, scale)
        for start in range(0, K, B):
            units = _load(x_ptr, factor_ptr, start + cols, K, FACTOR) * inverse
            tl.store(codes_ptr + start + cols, units.to(codes_ptr.dtype.element_ty), start + cols < K)


@launch.kernel
def _lay(h_ptr, scale_ptr, shift_ptr, tail_ptr, count, N, h_stride, tail_stride, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    row, col = at // N, at % N
    value = tl.load(h_ptr + row.to(tl.int64) * h_stride + col, at < count, other=0.0).to(tl.float32)
    inverse = tl.div_rn(1.0, tl.load(scale_ptr + row, at < count, other=1.0)) * tl.load(shift_ptr)
    place = tail_ptr + row.to(tl.int64) * tail_stride + col
    lay_pieces(value * inverse, place, N, at < count, tail_ptr.dtype.element_ty)


@launch.kernel
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
        low_half = ((a >> (8 * i)) & 255) | (((b >> (8 * i)) & 255) << 8)
        high_half = (((c >> (8 * i)) & 255) << 16) | (((d >> (8 * i)) & 255) << 24)
        tl.store(target + i * out_stride, tl.trans(low_half | high_half), turned)


def warps(width: int) -> int:
    """The number of warps of a program that holds a row of this width."""
    return min(32, max(1, launch.power_of_two(width) // 1024))


def quantise(
    x: torch.Tensor,
    codes: torch.Tensor,
    factor: torch.Tensor | None,
    reach: torch.Tensor | None,
    slack: float,
) -> torch.Tensor:
    tokens, width = x.shape
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    block = min(ONE, launch.power_of_two(width))
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
