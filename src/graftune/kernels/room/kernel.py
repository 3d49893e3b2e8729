"""A program writes a tile of the room. It is small (a few dozen columns beside a weight), so this costs its launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels.launch import power_of_two
from graftune.kernels.room.reference import Adapters

TILE, WIDEST = 4096, 128  # values of a tile, and its columns at most beside the weight


@triton.jit
def _beside(
    up_ptr, out_ptr, rows, room, stride, scale, c0, c1, c2, s0, s1, s2, o0, o1, o2,
    R: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Members begin at rows c, end at rows s and have rows o of the stacked B's; one that is not there ends at 0."""
    row = (tl.program_id(0) * BR + tl.arange(0, BR))[:, None]
    column = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    member = column // R
    start = tl.where(member == 0, c0, tl.where(member == 1, c1, c2))
    stop = tl.where(member == 0, s0, tl.where(member == 1, s1, tl.where(member == 2, s2, 0)))
    first = tl.where(member == 0, o0, tl.where(member == 1, o1, o2))
    inside = (row >= start) & (row < stop)
    at = (first + row - start).to(tl.int64) * R + column % R
    value = tl.load(up_ptr + at, inside, other=0.0).to(tl.float32) * scale
    to = out_ptr + row.to(tl.int64) * stride + column
    tl.store(to, value.to(out_ptr.dtype.element_ty), (row < rows) & (column < room))


@triton.jit
def _below(down_ptr, out_ptr, filled, width, stride, B: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * B + tl.arange(0, B)
    there = tl.where(row < filled, width, 0)
    value = tl.load(down_ptr + row.to(tl.int64) * width + at, at < there, other=0.0)
    tl.store(out_ptr + row.to(tl.int64) * stride + at, value, at < width)


def beside(target: torch.Tensor, adapters: Adapters) -> None:
    (rows, room), up = target.shape, adapters.up
    assert up.is_contiguous() and len(adapters.columns) <= 3
    spare = [0] * (3 - len(adapters.columns))
    starts, stops, firsts, row = [], [], [], 0
    for start, stop in adapters.columns:
        starts.append(start)
        stops.append(stop)
        firsts.append(row)
        row += stop - start
    across = min(WIDEST, power_of_two(room))
    down = TILE // across
    _beside[(triton.cdiv(rows, down), triton.cdiv(room, across))](
        up, target, rows, room, target.stride(0), adapters.scale, *starts, *spare, *stops, *spare, *firsts, *spare,
        R=up.shape[1], BR=down, BC=across, num_warps=4,
    )  # fmt: skip


def below(target: torch.Tensor, adapters: Adapters) -> None:
    assert adapters.down.is_contiguous()
    room, width = target.shape
    block = min(TILE, power_of_two(width))
    _below[(room, triton.cdiv(width, block))](
        adapters.down, target, len(adapters.down), width, target.stride(0), B=block, num_warps=4
    )
