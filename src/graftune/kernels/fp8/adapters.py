# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""Writes all adapters of a model as codes beside and below their weights, after every update, in three launches.

`_measure` finds the norm and the largest value of each rank, `_figures` derives reach and shift of each group from
them, `_quantise` writes the codes hi, lo and hi. Tables, made once, have the addresses that they read and write, so a
captured update quantises the current adapters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.fp8.adapter_products import beyond_code
from graftune.kernels.fp8.reference import HEADROOM, LARGEST, MOST_Q, AdapterCodes
from graftune.kernels.lora_linear.reference import members

PIECE = 2048  # values that one program writes as codes


@launch.kernel
def _measure(a_type_ptr, table_ptr, alpha_ptr, stats_ptr, B: tl.constexpr):
    """Of one rank of one group: |A_r|^2, max |A_r|, and the same of the column of u = s B / scale.
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


@launch.kernel
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


@launch.kernel
def _quantise(a_type_ptr, code_type_ptr, table_ptr, alpha_ptr, B: tl.constexpr):
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
    tl.store(place + distance, beyond_code(value).to(kind), mask)
    tl.store(place + 2 * distance, hi, mask)


def quantise_adapters(groups: Sequence[AdapterCodes], tables: dict[str, torch.Tensor]) -> None:
    """Quantises all groups in three launches. The first call makes their tables, so it must not be captured."""
    if "fp8.ranks" not in tables:
        _make_tables(groups, tables)
    kinds = groups[0].down, groups[0].beside
    stats = tables["fp8.stats"]
    _measure[(len(stats),)](kinds[0], tables["fp8.ranks"], tables["fp8.rank_alpha"], stats, B=1024, num_warps=4)
    _figures[(len(groups),)](
        stats, tables["fp8.groups"], B=64, LARGEST=LARGEST, HEADROOM=HEADROOM, MOST_Q=MOST_Q, num_warps=1
    )
    pieces = tables["fp8.pieces"]
    _quantise[(len(pieces),)](*kinds, pieces, tables["fp8.piece_alpha"], B=PIECE, num_warps=4)


def _make_tables(groups: Sequence[AdapterCodes], tables: dict[str, torch.Tensor]) -> None:
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

    for group in groups:
        assert group.down.is_contiguous() and group.up.is_contiguous() and group.scale.is_contiguous()
        n, into = group.down.shape
        rank = group.up.shape[1]
        lines.append((len(ranks), n, group.figures.data_ptr()))
        for columns, rows, place in members(group.columns, rank):
            up, scale = group.up[rows], group.scale[columns]
            for r in range(rank):
                down = group.down[place.start + r]
                ranks.append((down.data_ptr(), into, up[:, r].data_ptr(), len(up), rank, scale.data_ptr()))
                rank_alpha.append(group.alpha)
            beside = group.beside[columns, place.start :]
            lay_out(up, beside, n * beside.stride(1), scale, group.figures[1], group.alpha)
        lay_out(group.down, group.below, n * group.below.stride(0), None, group.figures[3], 1.0)
    device = groups[0].down.device
    tables["fp8.ranks"] = torch.tensor(ranks, dtype=torch.int64).to(device)
    tables["fp8.groups"] = torch.tensor(lines, dtype=torch.int64).to(device)
    tables["fp8.pieces"] = torch.tensor(pieces, dtype=torch.int64).to(device)
    tables["fp8.rank_alpha"] = torch.tensor(rank_alpha, dtype=torch.float32).to(device)
    tables["fp8.piece_alpha"] = torch.tensor(piece_alpha, dtype=torch.float32).to(device)
    tables["fp8.stats"] = torch.empty(len(ranks), 4, dtype=torch.float32, device=device)
