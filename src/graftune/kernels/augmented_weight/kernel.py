"""Each program writes one tile of the adapter columns or rows. They are a few dozen, so the launch is the only cost."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.augmented_weight.reference import Adapters
from graftune.kernels.lora_linear.kernel import of_member, places

TILE, WIDEST = 4096, 128  # values per tile, and the most columns of a tile next to the weight


@launch.kernel
def _beside(
    up_ptr, out_ptr, rows, adapter_columns, stride, scale, starts, stops, offsets,
    R: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`starts` to `stops`: each member's rows of the weight; `offsets`: the first of its rows in the stacked B's."""
    row = (tl.program_id(0) * BR + tl.arange(0, BR))[:, None]
    column = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    member = column // R
    start, stop, first = of_member(member, starts), of_member(member, stops), of_member(member, offsets)
    inside = (row >= start) & (row < stop) & (member < len(starts))
    at = (first + row - start).to(tl.int64) * R + column % R
    value = tl.load(up_ptr + at, inside, other=0.0).to(tl.float32) * scale
    to = out_ptr + row.to(tl.int64) * stride + column
    tl.store(to, value.to(out_ptr.dtype.element_ty), (row < rows) & (column < adapter_columns))


@launch.kernel
def _below(down_ptr, out_ptr, filled, width, stride, B: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * B + tl.arange(0, B)
    there = tl.where(row < filled, width, 0)
    value = tl.load(down_ptr + row.to(tl.int64) * width + at, at < there, other=0.0)
    tl.store(out_ptr + row.to(tl.int64) * stride + at, value, at < width)


def beside(target: torch.Tensor, adapters: Adapters) -> None:
    (rows, adapter_columns), up = target.shape, adapters.up
    assert up.is_contiguous()
    across = min(WIDEST, launch.power_of_two(adapter_columns))
    down = TILE // across
    starts, stops, offsets, _ = places(adapters.columns, down)
    _beside[(triton.cdiv(rows, down), triton.cdiv(adapter_columns, across))](
        up, target, rows, adapter_columns, target.stride(0), adapters.scale, starts, stops, offsets,
        R=up.shape[1], BR=down, BC=across, num_warps=4,
    )  # fmt: skip


def below(target: torch.Tensor, adapters: Adapters) -> None:
    assert adapters.down.is_contiguous()
    adapter_rows, width = target.shape
    block = min(TILE, launch.power_of_two(width))
    _below[(adapter_rows, triton.cdiv(width, block))](
        adapters.down, target, len(adapters.down), width, target.stride(0), B=block, num_warps=4
    )
