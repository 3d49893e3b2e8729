"""Dequantising reads half a byte a value and writes two, so stores bound it: a thread takes the eight codes of one
word and stores their values as 16 bytes next to its neighbour's. Wider loads would leave gaps between a warp's stores.

The table's sixteen values are looked up in memory: they share a cache line, so a warp's lookup is one access however
its codes differ, while choosing among sixteen constants takes more instructions than the memory leaves time for. A tile
has one word a thread, so that a value is computed by the thread that stores it (with more, Triton moves values through
shared memory): 31 registers, 11 instructions a value on sm_90. A program has two such tiles, for more loads in flight.

Products and sums are rounded one by one (`enable_fp_fusion=False`): the values are then the reference's to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.nf4 import reference
from graftune.kernels.nf4.reference import Nf4

THREADS, TILES = 256, 2  # of a program: words of eight codes in a tile, and tiles (the kernel's code has two)
MOST_WORDS = 2**31 - THREADS * TILES  # of one call, 17 billion values: 64-bit divisions would cost time
ODD_TILE, BLOCKS = 1024, 16  # a program's values in the kernel for odd sizes, and its blocks when quantising


@triton.jit
def _scale(
    absmax, nested_absmax, nested_map, offset, block, inside, DOUBLE: tl.constexpr, PART_BLOCKS: tl.constexpr
):  # fmt: skip
    """PART_BLOCKS: blocks that share an offset; 0: all do."""
    if DOUBLE:
        code = tl.load(absmax + block, inside, other=0).to(tl.int32)
        group = tl.load(nested_absmax + (block >> 8), inside, other=0.0)
        least = tl.load(offset + block // PART_BLOCKS, inside, other=0.0) if PART_BLOCKS else tl.load(offset)
        return tl.load(nested_map + code) * group + least
    else:
        return tl.load(absmax + block, inside, other=0.0)


@triton.jit
def _store(out, table, word, scale, at, inside, row_stride, ROW_WORDS: tl.constexpr):
    """The eight values of each word: value j is half a byte, the higher half where j is even."""
    j = tl.arange(0, 8)
    code = (word[:, None] >> ((j >> 1) * 8 + 4 - (j & 1) * 4)[None, :]) & 15
    value = tl.load(table + code) * scale[:, None]
    if ROW_WORDS == 0:
        place = at.to(tl.int64) * 8
    else:
        row = at // ROW_WORDS
        place = row.to(tl.int64) * row_stride + (at - row * ROW_WORDS) * 8
    tl.store(out + (place[:, None] + j[None, :]), value.to(out.dtype.element_ty), inside[:, None])


@launch.kernel(do_not_specialize=["first_block"])
def _dequantise(
    codes,
    absmax,
    nested_absmax,
    nested_map,
    offset,
    table,
    out,
    words,
    first_block,
    row_stride,
    used,
    DOUBLE: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    USED_WORDS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """ROW_WORDS: words of a row where rows lie apart, else 0. A constant, because each word's row is a division.
    USED_WORDS: words of an expert, which is left out if no row of `used` is its own; 0: nothing is left out."""
    at0 = tl.program_id(0) * (THREADS * 2) + tl.arange(0, THREADS)
    at1 = at0 + THREADS
    in0, in1 = at0 < words, at1 < words
    if USED_WORDS:
        in0 &= tl.load(used + at0 // USED_WORDS + 1, in0, other=0) > tl.load(used + at0 // USED_WORDS, in0, other=0)
        in1 &= tl.load(used + at1 // USED_WORDS + 1, in1, other=0) > tl.load(used + at1 // USED_WORDS, in1, other=0)
    word0 = tl.load(codes + at0, in0, other=0)
    word1 = tl.load(codes + at1, in1, other=0)
    scale0 = _scale(absmax, nested_absmax, nested_map, offset, first_block + (at0 >> 3), in0, DOUBLE, PART_BLOCKS)
    scale1 = _scale(absmax, nested_absmax, nested_map, offset, first_block + (at1 >> 3), in1, DOUBLE, PART_BLOCKS)
    _store(out, table, word0, scale0, at0, in0, row_stride, ROW_WORDS)
    _store(out, table, word1, scale1, at1, in1, row_stride, ROW_WORDS)


@launch.kernel(do_not_specialize=["first"])
def _dequantise_odd(
    codes,
    absmax,
    nested_absmax,
    nested_map,
    offset,
    table,
    out,
    count,
    first,
    width,
    row_stride,
    DOUBLE: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Value by value: for rows or ends that are no multiple of eight, which no model's large weights have."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    element = first + at
    byte = tl.load(codes + (element >> 1), inside, other=0).to(tl.int32)
    code = tl.where((element & 1) == 0, byte >> 4, byte & 15)
    scale = _scale(absmax, nested_absmax, nested_map, offset, element >> 6, inside, DOUBLE, PART_BLOCKS)
    value = tl.load(table + code) * scale
    row = at // width
    tl.store(out + (row * row_stride + (at - row * width)), value.to(out.dtype.element_ty), inside)


@launch.kernel
def _encode(values, borders, codes, absmax, count, LEAST: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = tl.load(values + at, at < count, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    ragged = block * 64 + 64 > count
    least = tl.maximum(largest, tl.full((BLOCKS,), LEAST, tl.float32))  # a bare constant this small would be fp64
    tl.store(absmax + block, tl.where(ragged, least, largest), block * 64 < count)
    divided = tl.div_rn(x, tl.broadcast_to(least[:, None], (BLOCKS, 64)))
    scaled = tl.where(ragged[:, None], divided, x * tl.div_rn(tl.full((BLOCKS,), 1.0, tl.float32), least)[:, None])
    scaled = tl.minimum(tl.maximum(scaled, -1.0), 1.0)
    code = tl.zeros((BLOCKS, 64), tl.int32)
    for i in tl.static_range(15):
        code += (scaled > tl.load(borders + i)).to(tl.int32)
    first_code, second_code = tl.split(tl.reshape(code, (BLOCKS, 32, 2)))
    place = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(codes + place, (first_code * 16 + second_code).to(tl.uint8), place * 2 < count)


def dequantise(nf4: Nf4, out: torch.Tensor, start: int, used: torch.Tensor | None = None) -> None:
    """Writes the rows from `start` on to out [rows, width]. The first call on a device makes its table, so it must not
    happen during a capture."""
    rows, width = out.shape
    first, count = start * width, rows * width
    flat = out.is_contiguous()
    # Without double quantisation the kernel reads none of the three pointers in between.
    nested = [x if x is not None else nf4.absmax for x in (nf4.nested_absmax, nf4.nested_map, nf4.offset)]
    table = reference.table_on(nf4.device)
    aligned = nf4.codes.data_ptr() % 4 == 0 and nf4.codes.storage_offset() % 4 == 0
    if first % reference.BLOCK or count % 8 or not (flat or width % 8 == 0) or not aligned:
        _dequantise_odd[(triton.cdiv(count, ODD_TILE),)](
            nf4.codes,
            nf4.absmax,
            *nested,
            table,
            out,
            count,
            first,
            width,
            out.stride(0),
            DOUBLE=nf4.double,
            PART_BLOCKS=nf4.part_blocks,
            TILE=ODD_TILE,
            num_warps=4,
            enable_fp_fusion=False,
        )
        return
    words = count // 8
    assert words <= MOST_WORDS, "the kernel counts words in 32 bits"
    _dequantise[(triton.cdiv(words, THREADS * TILES),)](
        nf4.codes[first // 2 : (first + count) // 2].view(torch.int32),
        nf4.absmax,
        *nested,
        table,
        out,
        words,
        first // reference.BLOCK,
        out.stride(0),
        table if used is None else used,
        DOUBLE=nf4.double,
        ROW_WORDS=0 if flat else width // 8,
        PART_BLOCKS=nf4.part_blocks,
        USED_WORDS=0 if used is None else words // (len(used) - 1),
        THREADS=THREADS,
        num_warps=THREADS // 32,
        enable_fp_fusion=False,
    )


def encode(values: torch.Tensor, codes: torch.Tensor, absmax: torch.Tensor) -> None:
    """`reference.encode` in one launch."""
    blocks = triton.cdiv(len(values), reference.BLOCK)
    _encode[(triton.cdiv(blocks, BLOCKS),)](
        values,
        reference.borders(values.device),
        codes,
        absmax,
        len(values),
        LEAST=reference.LEAST,
        BLOCKS=BLOCKS,
        num_warps=4,
        enable_fp_fusion=False,
    )
