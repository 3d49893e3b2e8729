"""Products by group in Triton. The grid is as large as any division of the rows among the experts may need it: every
expert wastes at most one tile, so S / BM + E tiles of rows are enough. A program finds its expert by counting how many
experts' tiles come before it, and leaves if there is none: no count ever goes to the host.

Legend: S rows, E experts, BE E up to a power of two, BM rows a tile, BN columns a tile, BK of the sum at a time.
"""
# mypy: disallow-untyped-defs=False
# The parameters of a kernel are pointers and numbers of the device; there is no Python type for them.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.experts.reference import Starts


def multiply(x: torch.Tensor, weight: torch.Tensor, starts: Starts, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.new_empty(len(x), weight.shape[1])
    launch_multiply(x, weight, starts.at, out, 1.0, add=False, bias=bias)
    return out


def add_multiplied_(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, starts: Starts, scale: float) -> None:
    launch_multiply(x, weight, starts.at, y, scale, add=True)


def launch_multiply(
    x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, out: torch.Tensor, scale: float, *, add: bool,
    bias: torch.Tensor | None = None,
) -> None:  # fmt: skip
    rows, (experts, width, depth) = len(x), weight.shape
    exact = x.dtype == torch.float32
    bm, bn = 32 if exact else 64, min(launch.power_of_two(width, 16), 64 if exact else 128)
    bk = min(launch.power_of_two(depth, 16), 32 if exact else 64)
    _multiply[(triton.cdiv(rows, bm) + experts, triton.cdiv(width, bn))](
        x, weight, starts, starts if bias is None else bias, out, scale, width, depth, x.stride(0), x.stride(1),
        *weight.stride(), 0 if bias is None else bias.stride(0), out.stride(0), E=experts,
        BE=launch.power_of_two(experts), BM=bm, BN=bn, BK=bk, ADD=add, BIAS=bias is not None, num_warps=4, num_stages=3,
    )  # fmt: skip


def add_products_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, starts: Starts, scale: float) -> None:
    experts, height, width = total.shape
    exact = a.dtype == torch.float32
    bm, bn = (min(launch.power_of_two(n, 16), 32 if exact else 64) for n in (height, width))
    _add_products[(experts, triton.cdiv(height, bm), triton.cdiv(width, bn))](
        total, a, b, starts.at, scale, height, width, *total.stride(), a.stride(0), b.stride(0),
        BM=bm, BN=bn, BK=32 if exact else 64, num_warps=4, num_stages=3,
    )  # fmt: skip


@launch.kernel
def _multiply(
    x_ptr, w_ptr, starts_ptr, bias_ptr, out_ptr, scale, N, K, x_row, x_col, w_expert, w_row, w_col, bias_row, out_row,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ADD: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
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
        rows = start + tl.arange(0, BM)
        inside = rows < tl.sum(tl.where(is_my_expert, last, 0), 0)
        rows = rows.to(tl.int64)
        cols = tl.program_id(1) * BN + tl.arange(0, BN)
        weight = w_ptr + expert.to(tl.int64) * w_expert + cols[None, :].to(tl.int64) * w_row
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            k_offsets = k + tl.arange(0, BK)
            x_mask, w_mask = inside[:, None] & (k_offsets[None, :] < K), (k_offsets[:, None] < K) & (cols[None, :] < N)
            x = tl.load(x_ptr + rows[:, None] * x_row + k_offsets[None, :] * x_col, x_mask, other=0.0)
            w = tl.load(weight + k_offsets[:, None].to(tl.int64) * w_col, w_mask, other=0.0)
            sums = tl.dot(x, w, sums, input_precision="ieee")
        sums *= scale
        if BIAS:
            sums += tl.load(bias_ptr + expert.to(tl.int64) * bias_row + cols, cols < N, other=0.0)[None, :]
        places = out_ptr + rows[:, None] * out_row + cols[None, :]
        mask = inside[:, None] & (cols[None, :] < N)
        if ADD:
            sums += tl.load(places, mask, other=0.0).to(tl.float32)
        tl.store(places, sums.to(out_ptr.dtype.element_ty), mask)


@launch.kernel
def _add_products(
    total_ptr, a_ptr, b_ptr, starts_ptr, scale, M, N, total_expert, total_row, total_col, a_row, b_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    start, stop = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    m_offsets, n_offsets = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(2) * BN + tl.arange(0, BN)
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for at in range(start, stop, BK):
        rows = at + tl.arange(0, BK)
        inside, rows64 = rows < stop, rows.to(tl.int64)
        a = tl.load(
            a_ptr + rows64[None, :] * a_row + m_offsets[:, None], inside[None, :] & (m_offsets[:, None] < M), other=0.0
        )
        b = tl.load(
            b_ptr + rows64[:, None] * b_row + n_offsets[None, :], inside[:, None] & (n_offsets[None, :] < N), other=0.0
        )
        sums = tl.dot(a, b, sums, input_precision="ieee")
    places = (
        total_ptr + expert.to(tl.int64) * total_expert + m_offsets[:, None] * total_row + n_offsets[None, :] * total_col
    )
    mask = (m_offsets[:, None] < M) & (n_offsets[None, :] < N)
    if stop > start:
        tl.store(places, tl.load(places, mask, other=0.0) + sums * scale, mask)
