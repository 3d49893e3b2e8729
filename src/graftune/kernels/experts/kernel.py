"""Products by group in Triton. The grid is as large as any division of the rows among the experts may need it: every
expert wastes at most one tile, so S / BM + E tiles of rows are enough. A program finds its expert by counting how many
experts' tiles come before it, and leaves if there is none: no count ever goes to the host.

A product gathers its rows while it loads them: of the k rows of a token all but one come from the cache. The adapters'
second product, [BM, R] by [R, BN], fills the sums before the long loop begins, so that it needs no registers of its
own. Consecutive programs take the columns of one tile of rows.

Legend: S rows, E experts, BE E up to a power of two, BM rows a tile, BN columns a tile, BK of the sum at a time,
R rank, BR R up to a power of two, T tokens, D width, k rows a token.
"""
# mypy: disallow-untyped-defs=False
# The parameters of a kernel are pointers and numbers of the device; there is no Python type for them.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.experts.reference import Starts, Terms

# (rows, columns, depth, warps, stages) of a tile: of products, and of those with few columns (the adapters' first).
WIDE, NARROW, EXACT = (128, 256, 64, 8, 4), (128, 64, 64, 4, 4), (32, 64, 32, 4, 2)
COLUMNS = 2048  # of `combine`, per program


def multiply(x: torch.Tensor, weight: torch.Tensor, starts: Starts, terms: Terms) -> torch.Tensor:
    count = len(x) if terms.rows is None else len(terms.rows)
    out = x.new_empty(count, weight.shape[1])
    launch_multiply(x, weight, starts.at, out, terms)
    return out


def launch_multiply(
    x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, out: torch.Tensor, terms: Terms
) -> None:
    experts, width, depth = weight.shape
    rows, bias, low, up, scale = terms
    bm, bn, bk, warps, stages = _tile(x.dtype, width)
    bn, bk = min(launch.power_of_two(width, 16), bn), min(launch.power_of_two(depth, 16), bk)
    columns, rank = triton.cdiv(width, bn), 0 if low is None else low.shape[1]
    assert x.stride(1) == 1 and (low is None or low.stride(1) == 1)
    _multiply[((triton.cdiv(len(out), bm) + experts) * columns,)](
        x, weight, starts, starts if rows is None else rows, starts if bias is None else bias,
        x if low is None else low, weight if up is None else up, out, scale, width, depth, rank, columns,
        x.stride(0), *weight.stride(), 0 if bias is None else bias.stride(0), 0 if low is None else low.stride(0),
        *((0, 0, 0) if up is None else up.stride()), out.stride(0),
        E=experts, BE=launch.power_of_two(experts), BM=bm, BN=bn, BK=bk,
        BR=launch.power_of_two(rank, 16) if rank else 0, ROWS=rows is not None, BIAS=bias is not None,
        WHOLE=depth % bk == 0 and width % bn == 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _tile(dtype: torch.dtype, width: int) -> tuple[int, int, int, int, int]:
    return EXACT if dtype == torch.float32 else WIDE if width > NARROW[1] else NARROW


def add_products_(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, starts: Starts, scale: float,
    a_rows: torch.Tensor | None, b_rows: torch.Tensor | None,
) -> None:  # fmt: skip
    experts, height, width = total.shape
    exact = a.dtype == torch.float32
    bm, bn = (min(launch.power_of_two(n, 16), 32 if exact else 64) for n in (height, width))
    _add_products[(experts, triton.cdiv(height, bm), triton.cdiv(width, bn))](
        total, a, b, starts.at, a if a_rows is None else a_rows, b if b_rows is None else b_rows, scale, height, width,
        *total.stride(), a.stride(0), b.stride(0), BM=bm, BN=bn, BK=32 if exact else 64,
        A_ROWS=a_rows is not None, B_ROWS=b_rows is not None, num_warps=4, num_stages=3,
    )  # fmt: skip


def combine(y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    (tokens, chosen), width = places.shape, y.shape[1]
    out = y.new_empty(tokens, width)
    columns = min(launch.power_of_two(width), COLUMNS)
    _combine[(tokens, triton.cdiv(width, columns))](
        y, places, places if weights is None else weights, out, width, y.stride(0), *places.stride(),
        *((0, 0) if weights is None else weights.stride()), out.stride(0),
        CHOSEN=chosen, WEIGHED=weights is not None, BD=columns, num_warps=4,
    )  # fmt: skip
    return out


@launch.kernel
def _multiply(
    x_ptr, w_ptr, starts_ptr, rows_ptr, bias_ptr, low_ptr, up_ptr, out_ptr, scale, N, K, R, columns,
    x_row, w_expert, w_row, w_col, bias_row, low_row, up_expert, up_row, up_col, out_row,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    ROWS: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    tile, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    experts = tl.arange(0, BE)
    first = tl.load(starts_ptr + experts, experts < E, other=0)
    last = tl.load(starts_ptr + experts + 1, experts < E, other=0)
    tiles = (last - first + BM - 1) // BM
    before = tl.cumsum(tiles, 0)
    expert = tl.sum((before <= tile).to(tl.int32), 0)
    if expert < E:
        is_my_expert = experts == expert
        start = (
            tl.sum(tl.where(is_my_expert, first, 0), 0)
            + (tile - tl.sum(tl.where(is_my_expert, before - tiles, 0), 0)) * BM
        )
        stop = tl.sum(tl.where(is_my_expert, last, 0), 0)
        rows = start + tl.arange(0, BM)
        inside = rows < stop
        rows = tl.minimum(rows, stop - 1).to(tl.int64)  # what is read again is not stored
        cols = column * BN + tl.arange(0, BN)
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        if BR:
            r_offsets = tl.arange(0, BR)
            low = tl.load(low_ptr + rows[:, None] * low_row + r_offsets[None, :], (r_offsets < R)[None, :], other=0.0)
            up = up_ptr + expert.to(tl.int64) * up_expert + cols[None, :].to(tl.int64) * up_row
            up = tl.load(up + r_offsets[:, None] * up_col, (r_offsets < R)[:, None] & (cols < N)[None, :], other=0.0)
            sums = tl.dot(low, up, sums, input_precision="ieee") * scale
        from_rows = tl.load(rows_ptr + rows).to(tl.int64) if ROWS else rows
        k_offsets = tl.arange(0, BK)
        x_at = x_ptr + from_rows[:, None] * x_row + k_offsets[None, :]
        w_at = w_ptr + expert.to(tl.int64) * w_expert + cols[None, :].to(tl.int64) * w_row
        w_at += k_offsets[:, None].to(tl.int64) * w_col
        for k in range(0, K, BK):
            if WHOLE:
                x = tl.load(x_at)
                w = tl.load(w_at)
            else:
                x = tl.load(x_at, (k + k_offsets < K)[None, :], other=0.0)
                w = tl.load(w_at, (k + k_offsets < K)[:, None] & (cols < N)[None, :], other=0.0)
            sums = tl.dot(x, w, sums, input_precision="ieee")
            x_at += BK
            w_at += BK * w_col
        if BIAS:
            sums += tl.load(bias_ptr + expert.to(tl.int64) * bias_row + cols, cols < N, other=0.0)[None, :]
        places = out_ptr + rows[:, None] * out_row + cols[None, :]
        tl.store(places, sums.to(out_ptr.dtype.element_ty), inside[:, None] & (cols < N)[None, :])


@launch.kernel
def _add_products(
    total_ptr, a_ptr, b_ptr, starts_ptr, a_rows_ptr, b_rows_ptr, scale, M, N, total_expert, total_row, total_col,
    a_row, b_row, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    start, stop = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    m_offsets, n_offsets = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(2) * BN + tl.arange(0, BN)
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for at in range(start, stop, BK):
        rows = at + tl.arange(0, BK)
        inside = rows < stop
        from_a = tl.load(a_rows_ptr + rows, inside, other=0).to(tl.int64) if A_ROWS else rows.to(tl.int64)
        from_b = tl.load(b_rows_ptr + rows, inside, other=0).to(tl.int64) if B_ROWS else rows.to(tl.int64)
        a = tl.load(
            a_ptr + from_a[None, :] * a_row + m_offsets[:, None], inside[None, :] & (m_offsets[:, None] < M), other=0.0
        )
        b = tl.load(
            b_ptr + from_b[:, None] * b_row + n_offsets[None, :], inside[:, None] & (n_offsets[None, :] < N), other=0.0
        )
        sums = tl.dot(a, b, sums, input_precision="ieee")
    places = (
        total_ptr + expert.to(tl.int64) * total_expert + m_offsets[:, None] * total_row + n_offsets[None, :] * total_col
    )
    mask = (m_offsets[:, None] < M) & (n_offsets[None, :] < N)
    if stop > start:
        tl.store(places, tl.load(places, mask, other=0.0) + sums * scale, mask)


@launch.kernel
def _combine(
    y_ptr, places_ptr, weights_ptr, out_ptr, D, y_row, places_row, places_col, weights_row, weights_col, out_row,
    CHOSEN: tl.constexpr, WEIGHED: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = cols < D
    total = tl.zeros((BD,), dtype=tl.float32)
    for j in tl.static_range(CHOSEN):
        place = tl.load(places_ptr + token * places_row + j * places_col).to(tl.int64)
        row = tl.load(y_ptr + place * y_row + cols, inside, other=0.0).to(tl.float32)
        if WEIGHED:
            row *= tl.load(weights_ptr + token * weights_row + j * weights_col)
        total += row
    tl.store(out_ptr + token * out_row + cols, total.to(out_ptr.dtype.element_ty), inside)
