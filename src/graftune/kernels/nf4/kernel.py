"""Dequantising reads half a byte a value and writes two, so the stores decide: a thread takes the eight codes of one word
and stores their values as 16 bytes, next to its neighbour's. Wider loads would leave gaps between the stores of a warp.

The table's sixteen values are looked up in memory: they share a cache line, so a warp's lookup is one access however its
codes differ, where choosing among sixteen constants takes more instructions than the memory leaves time for. All loads
are one-dimensional with one element a thread, which keeps every value in the thread that stores it; a tile of [words, 8]
would be carried through shared memory twice. Each thread takes WORDS words, all loaded before the first is used.

Products and sums are rounded one by one (`enable_fp_fusion=False`): the values are then the reference's to the bit.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from graftune.kernels.nf4 import reference
from graftune.kernels.nf4.reference import Nf4

THREADS, WORDS = 256, 2  # a program's threads, and words of eight codes a thread
ODD_TILE, BLOCKS = 1024, 16  # a program's values in the kernel for odd sizes, and its blocks when quantising


@triton.jit
def _scale(absmax, nested_absmax, nested_map, offset, block, inside, DOUBLE: tl.constexpr):
    if DOUBLE:
        code = tl.load(absmax + block, inside, other=0).to(tl.int32)
        group = tl.load(nested_absmax + (block >> 8), inside, other=0.0)
        return tl.load(nested_map + code) * group + tl.load(offset)
    else:
        return tl.load(absmax + block, inside, other=0.0)


@triton.jit
def _value(table, word, scale, SHIFT: tl.constexpr, dtype: tl.constexpr):
    return (tl.load(table + ((word >> SHIFT) & 15)) * scale).to(dtype)


@triton.jit
def _store(out, table, word, scale, at, inside, row_stride, ROW_WORDS: tl.constexpr, THREADS: tl.constexpr):
    """Eight values of each word. Joining puts the newest axis last, so the axis that varies fastest is joined last."""
    dtype: tl.constexpr = out.dtype.element_ty
    v0, v1 = _value(table, word, scale, 4, dtype), _value(table, word, scale, 0, dtype)
    v2, v3 = _value(table, word, scale, 12, dtype), _value(table, word, scale, 8, dtype)
    v4, v5 = _value(table, word, scale, 20, dtype), _value(table, word, scale, 16, dtype)
    v6, v7 = _value(table, word, scale, 28, dtype), _value(table, word, scale, 24, dtype)
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    eight = tl.reshape(tl.join(even, odd), (THREADS, 8))
    if ROW_WORDS == 0:
        place = at.to(tl.int64) * 8
    else:
        row = at // ROW_WORDS
        place = row.to(tl.int64) * row_stride + (at - row * ROW_WORDS) * 8
    tl.store(out + (place[:, None] + tl.arange(0, 8)[None, :]), eight, inside[:, None])


@triton.jit(do_not_specialize=["first_block"])
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
    DOUBLE: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """ROW_WORDS: words of a row where rows lie apart, else 0. A constant, because each word's row is a division."""
    at0 = tl.program_id(0) * (THREADS * 2) + tl.arange(0, THREADS)
    at1 = at0 + THREADS
    in0, in1 = at0 < words, at1 < words
    word0 = tl.load(codes + at0, in0, other=0)
    word1 = tl.load(codes + at1, in1, other=0)
    scale0 = _scale(absmax, nested_absmax, nested_map, offset, first_block + (at0 >> 3), in0, DOUBLE)
    scale1 = _scale(absmax, nested_absmax, nested_map, offset, first_block + (at1 >> 3), in1, DOUBLE)
    _store(out, table, word0, scale0, at0, in0, row_stride, ROW_WORDS, THREADS)
    _store(out, table, word1, scale1, at1, in1, row_stride, ROW_WORDS, THREADS)
