"""Dequantises GGUF blocks on the GPU by reference.py's formulas, with a lane for every four bytes of codes.

Writing is most of the traffic (two bytes a value against half a byte or so), and at the memory's speed there is time
for about fifteen instructions a value, half as many if they are on integers. So a tile consists of lanes: each loads a
word of codes and the block's scales (lanes that load the same address share one access), extracts the codes of four
adjacent values at once into the bytes of a word, and stores the four values together, 8 bytes in bf16; the next lane
stores those that follow. Loads are words where blocks are multiples of four bytes, else pairs of half words: these
blocks are even, and bytes would take twice the instructions. (MXFP4's blocks are odd and loaded by bytes.) A lane for
every value instead would load each byte of codes two or four times and decode its scale as often.

Lanes and blocks are one dimension, lanes first, so that neighbouring threads are neighbouring lanes. As two dimensions
they are equally contiguous to Triton, and along which of them its threads run depends on its version: along the blocks,
threads wrote to 32 blocks at a time, at a quarter of a copy's speed (H200).

Tiles run over the blocks of all rows in one sequence, so short rows waste nothing; the blocks per row are a constant at
compile time, so a block's row costs a multiplication and a shift. Contracted multiply-adds would change nothing (see
reference.py), but launches forbid them: equality to the bit should not depend on that proof.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graftune.kernels import launch, rehearsal
from graftune.kernels.gguf_dequant.reference import CURVE, FP4, KINDS

TILE, WARPS = 4096, 4  # a tile's values: 32 for every thread


@triton.jit
def _blocks(
    src_ptr, ids_ptr, out_ptr, count, out_steps,
    PICK: tl.constexpr, STEP: tl.constexpr, PER_ROW: tl.constexpr, SIZE: tl.constexpr, VALUES: tl.constexpr,
    LANES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """For every lane of a tile's blocks: its number, where the bytes of its block begin and whether that exists, and
    where its values go.

    out_steps * STEP is the distance of rows in `out`; by STEP Triton knows how wide a store may be.

    PICK 0: every row. 1: the rows that `ids` names. More: every row but those of experts that have so many rows each
    and compute nothing; `ids` has where the rows that each expert multiplies begin."""
    first = tl.program_id(0) * B
    each = tl.arange(0, B * LANES)
    local = each // LANES
    row = first // PER_ROW
    place = first - row * PER_ROW + local
    below = place // PER_ROW
    column = place - below * PER_ROW
    inside = first + local < count
    out = out_ptr + row.to(tl.int64) * out_steps * STEP
    out += (below.to(tl.int64) * out_steps) * STEP + column * VALUES
    if PICK == 1:
        source = tl.load(ids_ptr + row + below, inside, other=0).to(tl.int64)
        src = src_ptr + source * (PER_ROW * SIZE) + column * SIZE
    else:
        src = src_ptr + first.to(tl.int64) * SIZE + local * SIZE
    if PICK > 1:
        expert = ids_ptr + (row + below) // PICK
        inside &= tl.load(expert + 1, inside, other=0) > tl.load(expert, inside, other=0)
    return each % LANES, src, inside, out


@triton.jit
def _short(at, inside):
    return tl.load(at.to(tl.pointer_type(tl.uint16), bitcast=True), inside, other=0).to(tl.uint32)


@triton.jit
def _word(at, inside, ALIGNED: tl.constexpr):
    if ALIGNED:
        return tl.load(at.to(tl.pointer_type(tl.uint32), bitcast=True), inside, other=0)
    else:
        return _short(at, inside) | (_short(at + 2, inside) << 16)


@triton.jit
def _word_by_bytes(at, inside):
    """Of blocks with an odd number of bytes."""
    word = tl.load(at, inside, other=0).to(tl.uint32)
    for place in tl.static_range(1, 4):
        word |= tl.load(at + place, inside, other=0).to(tl.uint32) << (8 * place)
    return word


@triton.jit
def _half(bits):
    """The fp16 number in the lower half of a word."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _byte(word, PLACE: tl.constexpr, ZERO: tl.constexpr):
    """A word's byte 0, 1 or 2 (then below 128), less ZERO, in fp32: under the right exponent it is a number where it
    stands, without the shift and the conversion, which are operations on integers. Exact: all are small integers."""
    kept = (word & ((255 if PLACE < 2 else 127) << (8 * PLACE))) | (0x4B000000 - 0x04000000 * PLACE)
    return kept.to(tl.uint32).to(tl.float32, bitcast=True) - (8388608.0 / 256**PLACE + ZERO)


@triton.jit
def _bytes(word, ZERO: tl.constexpr):
    """Its four bytes likewise, [lanes] -> [lanes, 4]."""
    place = tl.arange(0, 4)[None, :]
    odd = place % 2
    kept = (word[:, None] >> (16 * (place // 2))) & (255 << (8 * odd))
    number = (kept | (0x4B000000 - 0x04000000 * odd)).to(tl.uint32).to(tl.float32, bitcast=True)
    return number - tl.where(odd == 0, 8388608.0 + ZERO, 32768.0 + ZERO)


@triton.jit
def _curved(curve_ptr, word):
    """CURVE at the low four bits of each byte, [lanes] -> [lanes, 4], looked up in memory: its sixteen numbers share a
    cache line. (Chosen among constants, value by value or for all four at once, it took more operations.)"""
    return tl.load(curve_ptr + ((word[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 15))


@triton.jit
def _store(out, at, values, inside):
    """`at`: where in its block a lane's four values begin."""
    to = (out + at)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(to, values.to(out.dtype.element_ty), inside[:, None])


@launch.kernel
def _legacy(
    src_ptr, ids_ptr, out_ptr, count, out_steps,
    PICK: tl.constexpr, STEP: tl.constexpr, PER_ROW: tl.constexpr, SIZE: tl.constexpr, B: tl.constexpr,
    MINIMUM: tl.constexpr, FIFTH: tl.constexpr,
):  # fmt: skip
    """Q4_0, Q4_1, Q5_0, Q5_1: d, perhaps m, perhaps the fifth bits, then 16 bytes of two codes each."""
    HEADER: tl.constexpr = SIZE - 16
    ALIGNED: tl.constexpr = SIZE % 4 == 0
    lane, src, inside, out = _blocks(src_ptr, ids_ptr, out_ptr, count, out_steps, PICK, STEP, PER_ROW, SIZE, 32, 4, B)
    if MINIMUM:
        head = _word(src, inside, ALIGNED)
        least = _half(head >> 16)[:, None]
    else:
        head = _short(src, inside)
    scale = _half(head)[:, None]
    codes = _word(src + HEADER + 4 * lane, inside, ALIGNED)
    if FIFTH:
        fifth = _word(src + HEADER - 4, inside, ALIGNED) >> (4 * lane)
    for half in tl.static_range(2):
        code = (codes >> (4 * half)) & 0x0F0F0F0F
        if FIFTH:  # the product brings four bits in a row to the four bytes
            code |= ((((fifth >> (16 * half)) & 15) * 0x00204081) & 0x01010101) << 4
        values = _bytes(code, 0 if MINIMUM else 16 if FIFTH else 8) * scale
        _store(out, 4 * lane + 16 * half, values + least if MINIMUM else values, inside)


@launch.kernel
def _q8_0(
    src_ptr, ids_ptr, out_ptr, count, out_steps,
    PICK: tl.constexpr, STEP: tl.constexpr, PER_ROW: tl.constexpr, SIZE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    lane, src, inside, out = _blocks(src_ptr, ids_ptr, out_ptr, count, out_steps, PICK, STEP, PER_ROW, SIZE, 32, 8, B)
    scale = _half(_short(src, inside))[:, None]
    codes = _word(src + 2 + 4 * lane, inside, False) ^ 0x80808080  # signed bytes, now 128 more
    _store(out, 4 * lane, _bytes(codes, 128) * scale, inside)


@launch.kernel
def _q2_k(
    src_ptr, ids_ptr, out_ptr, count, out_steps,
    PICK: tl.constexpr, STEP: tl.constexpr, PER_ROW: tl.constexpr, SIZE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """16 scales and minima of four bits; two runs of 32 bytes, each of four codes that stand 32 values apart; d, d'."""
    lane, src, inside, out = _blocks(src_ptr, ids_ptr, out_ptr, count, out_steps, PICK, STEP, PER_ROW, SIZE, 256, 16, B)
    run, part = lane // 8, lane % 8
    head = _word(src + 80, inside, True)
    scale, least = _half(head), _half(head >> 16)
    # Of each four scales that a word holds, the lanes of a run's first half need the first and third.
    at = 8 * (part // 4)
    scales = (_word(src + 8 * run, inside, True) >> at, _word(src + 8 * run + 4, inside, True) >> at)
    codes = _word(src + 16 + 4 * lane, inside, True)
    for field in tl.static_range(4):
        both = scales[field // 2]
        by = _byte(both & 0x0F0F0F0F, 2 * (field % 2), 0) * scale
        less = _byte((both >> 4) & 0x0F0F0F0F, 2 * (field % 2), 0) * least
        values = _bytes((codes >> (2 * field)) & 0x03030303, 0) * by[:, None] - less[:, None]
        _store(out, 128 * run + 32 * field + 4 * part, values, inside)


@launch.kernel
def _q3_k(
    src_ptr, ids_ptr, out_ptr, count, out_steps,
    PICK: tl.constexpr, STEP: tl.constexpr, PER_ROW: tl.constexpr, SIZE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """32 bytes of third bits; codes as in Q2_K; 16 scales, their low four bits in 8 bytes, the high two in 4; d."""
    lane, src, inside, out = _blocks(src_ptr, ids_ptr, out_ptr, count, out_steps, PICK, STEP, PER_ROW, SIZE, 256, 16, B)
    run, part = lane // 8, lane % 8
    scale = _half(_short(src + 108, inside))
    at = 4 * run + 8 * (part // 4)  # as in Q2_K, and the second run's scales lie above the first's
    scales = (_word(src + 96, inside, False) >> at, _word(src + 100, inside, False) >> at)
    upper = _word(src + 104, inside, False) >> at
    third = _word(src + 4 * part, inside, False) >> (4 * run)
    codes = _word(src + 32 + 4 * lane, inside, False)
    for field in tl.static_range(4):
        six = (scales[field // 2] & 0x0F0F0F0F) | (((upper >> (2 * (field // 2))) & 0x03030303) << 4)
        by = (_byte(six, 2 * (field % 2), 32) * scale)[:, None]
        code = ((codes >> (2 * field)) & 0x03030303) | (((third >> field) & 0x01010101) << 2)
        _store(out, 128 * run + 32 * field + 4 * part, _bytes(code, 4) * by, inside)


@launch.kernel
def _q4_k(
    src_ptr, ids_ptr, out_ptr, count, out_steps,
    PICK: tl.constexpr, STEP: tl.constexpr, PER_ROW: tl.constexpr, SIZE: tl.constexpr, B: tl.constexpr,
    FIFTH: tl.constexpr,
):  # fmt: skip
    """Q4_K, Q5_K: d, d'; 12 bytes of scales and minima; perhaps the fifth bits; four runs of 32 bytes of two codes."""
    lane, src, inside, out = _blocks(src_ptr, ids_ptr, out_ptr, count, out_steps, PICK, STEP, PER_ROW, SIZE, 256, 32, B)
    run, part = lane // 8, lane % 8
    head = _word(src, inside, True)
    scale, least = _half(head), _half(head >> 16)
    # Two scales and minima a run, six bits each; those of the later runs are in two parts.
    at = src + 2 * (run % 2)
    first, second, third = _short(at + 4, inside), _short(at + 8, inside), _short(at + 12, inside)
    scales = tl.where(run < 2, first & 0x3F3F, (third & 0x0F0F) | ((first >> 2) & 0x3030))
    minima = tl.where(run < 2, second & 0x3F3F, ((third >> 4) & 0x0F0F) | ((second >> 2) & 0x3030))
    codes = _word(src + SIZE - 128 + 4 * lane, inside, True)
    if FIFTH:
        fifth = _word(src + 16 + 4 * part, inside, True) >> (2 * run)
    for half in tl.static_range(2):
        by, less = _byte(scales, half, 0) * scale, _byte(minima, half, 0) * least
        code = (codes >> (4 * half)) & 0x0F0F0F0F
        if FIFTH:
            code |= ((fifth >> half) & 0x01010101) << 4
        values = _bytes(code, 0) * by[:, None] - less[:, None]
        _store(out, 64 * run + 32 * half + 4 * part, values, inside)


@launch.kernel
def _q6_k(
    src_ptr, ids_ptr, out_ptr, count, out_steps,
    PICK: tl.constexpr, STEP: tl.constexpr, PER_ROW: tl.constexpr, SIZE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Two runs of 64 bytes of low halves, two codes each, 64 values apart; two runs of 32 bytes of high pairs, four
    each, 32 values apart; 16 signed scales; d."""
    lane, src, inside, out = _blocks(src_ptr, ids_ptr, out_ptr, count, out_steps, PICK, STEP, PER_ROW, SIZE, 256, 32, B)
    run, part = lane // 16, lane % 16
    scale = _half(_short(src + 208, inside))
    to_scales = src + 192 + 8 * run + part // 4
    scales = (tl.load(to_scales, inside, other=0), tl.load(to_scales + 4, inside, other=0))
    codes = _word(src + 4 * lane, inside, False)
    upper = _word(src + 128 + 32 * run + 4 * (part % 8), inside, False) >> (2 * (part // 8))
    for half in tl.static_range(2):
        by = (_byte(scales[half].to(tl.uint32) ^ 128, 0, 128) * scale)[:, None]
        code = ((codes >> (4 * half)) & 0x0F0F0F0F) | (((upper >> (4 * half)) & 0x03030303) << 4)
        _store(out, 128 * run + 64 * half + 4 * part, _bytes(code, 32) * by, inside)


@launch.kernel
def _iq4_nl(
    src_ptr, ids_ptr, out_ptr, count, out_steps, curve_ptr,
    PICK: tl.constexpr, STEP: tl.constexpr, PER_ROW: tl.constexpr, SIZE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """d, then 16 bytes of two codes each."""
    lane, src, inside, out = _blocks(src_ptr, ids_ptr, out_ptr, count, out_steps, PICK, STEP, PER_ROW, SIZE, 32, 4, B)
    scale = _half(_short(src, inside))[:, None]
    codes = _word(src + 2 + 4 * lane, inside, False)
    for half in tl.static_range(2):
        _store(out, 4 * lane + 16 * half, _curved(curve_ptr, codes >> (4 * half)) * scale, inside)


@launch.kernel
def _iq4_xs(
    src_ptr, ids_ptr, out_ptr, count, out_steps, curve_ptr,
    PICK: tl.constexpr, STEP: tl.constexpr, PER_ROW: tl.constexpr, SIZE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """d; eight scales, their high pairs in 2 bytes and low halves in 4; eight runs of 16 bytes of two codes."""
    lane, src, inside, out = _blocks(src_ptr, ids_ptr, out_ptr, count, out_steps, PICK, STEP, PER_ROW, SIZE, 256, 32, B)
    run, part = lane // 4, lane % 4
    head = _word(src, inside, True)
    six = ((_word(src + 4, inside, True) >> (4 * run)) & 15) | (((head >> (16 + 2 * run)) & 3) << 4)
    by = (_byte(six, 0, 32) * _half(head))[:, None]
    codes = _word(src + 8 + 4 * lane, inside, True)
    for half in tl.static_range(2):
        _store(out, 32 * run + 16 * half + 4 * part, _curved(curve_ptr, codes >> (4 * half)) * by, inside)


@launch.kernel
def _mxfp4(
    src_ptr, ids_ptr, out_ptr, count, out_steps, curve_ptr,
    PICK: tl.constexpr, STEP: tl.constexpr, PER_ROW: tl.constexpr, SIZE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """An exponent, then 16 bytes of two codes each."""
    lane, src, inside, out = _blocks(src_ptr, ids_ptr, out_ptr, count, out_steps, PICK, STEP, PER_ROW, SIZE, 32, 4, B)
    exponent = tl.load(src, inside, other=0).to(tl.uint32)
    bits = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    scale = bits.to(tl.uint32).to(tl.float32, bitcast=True)[:, None]
    codes = _word_by_bytes(src + 1 + 4 * lane, inside)
    for half in tl.static_range(2):
        _store(out, 4 * lane + 16 * half, _curved(curve_ptr, codes >> (4 * half)) * scale, inside)


@launch.kernel
def _floats(
    src_ptr, ids_ptr, out_ptr, width, out_steps, PICK: tl.constexpr, STEP: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """A cast, row by row. (torch's own, into rows that lie apart, runs at 0.31 to 0.6 of a copy's speed.)"""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(ids_ptr + row).to(tl.int64) if PICK else row
    columns = tl.program_id(1) * B + tl.arange(0, B)
    values = tl.load(src_ptr + source * width + columns, columns < width, other=0.0)
    tl.store(out_ptr + row * out_steps * STEP + columns, values.to(out_ptr.dtype.element_ty), columns < width)


# kind -> its kernel and further compile-time constants
LAUNCHES: dict[str, tuple[Any, dict[str, bool]]] = {
    "Q4_0": (_legacy, {"MINIMUM": False, "FIFTH": False}),
    "Q4_1": (_legacy, {"MINIMUM": True, "FIFTH": False}),
    "Q5_0": (_legacy, {"MINIMUM": False, "FIFTH": True}),
    "Q5_1": (_legacy, {"MINIMUM": True, "FIFTH": True}),
    "IQ4_NL": (_iq4_nl, {}),
    "Q8_0": (_q8_0, {}),
    "Q2_K": (_q2_k, {}),
    "Q3_K": (_q3_k, {}),
    "Q4_K": (_q4_k, {"FIFTH": False}),
    "Q5_K": (_q4_k, {"FIFTH": True}),
    "Q6_K": (_q6_k, {}),
    "IQ4_XS": (_iq4_xs, {}),
    "MXFP4": (_mxfp4, {}),
}
_CURVES = {_iq4_nl: CURVE, _iq4_xs: CURVE, _mxfp4: FP4}


@rehearsal.cached
def _curve(device: torch.device, values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def alignment(stride: int) -> int:
    """The largest power of two up to 16 that divides a row stride."""
    return min(16, stride & -stride)


def cast(values: torch.Tensor, out: torch.Tensor, rows: torch.Tensor | None) -> None:
    """Writes values [rows of the weight, width] to `out`: all rows, or those that `rows` names."""
    if not len(out):
        return
    step, width = alignment(out.stride(0)), out.shape[1]
    block = min(TILE, launch.power_of_two(width))
    _floats[(len(out), triton.cdiv(width, block))](
        values, rows, out, width, out.stride(0) // step, PICK=rows is not None, STEP=step, B=block,
        num_warps=max(1, block * WARPS // TILE),
    )  # fmt: skip


def dequantise(
    blocks: torch.Tensor, kind: str, out: torch.Tensor, rows: torch.Tensor | None, used: torch.Tensor | None = None
) -> None:
    """Launches the kernel of a kind. The first call on a device for a kind with a curve makes its table, so it must not
    happen during a capture."""
    jitted, flags = LAUNCHES[kind]
    values, size = KINDS[kind]
    per_row = out.shape[1] // values
    count, tile = len(out) * per_row, TILE // values
    assert count < 2**31 - tile and blocks.data_ptr() % min(size & -size, 4) == 0
    if not count:
        return
    step = alignment(out.stride(0))
    curve = {"curve_ptr": _curve(out.device, _CURVES[jitted])} if jitted in _CURVES else {}
    jitted[(triton.cdiv(count, tile),)](
        blocks,
        rows if used is None else used,
        out,
        count,
        out.stride(0) // step,
        PICK=int(rows is not None) if used is None else len(out) // (len(used) - 1),
        STEP=step,
        PER_ROW=per_row,
        SIZE=size,
        B=tile,
        **curve,
        **flags,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
