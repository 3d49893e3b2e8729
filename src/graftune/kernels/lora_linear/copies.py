# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""Copies adapters where matrix products read them, every B next to its weight and every A below it, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.lora_linear.reference import Copy


@launch.kernel
def _spread(source_ptr, table_ptr, scale_ptr, B: tl.constexpr):
    """One piece of one copy: [offset in the source, target's address, width, row stride, first, size]."""
    row = table_ptr + tl.program_id(0) * 6
    offset, target = tl.load(row), tl.load(row + 1).to(tl.pointer_type(source_ptr.dtype.element_ty))
    width, stride = tl.load(row + 2).to(tl.int32), tl.load(row + 3)
    first, size = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
    at = first + tl.arange(0, B)  # 32 bits: the division dominates the cost
    value = tl.load(source_ptr + offset + at, at < size, other=0.0).to(tl.float32)
    value = (value * tl.load(scale_ptr + tl.program_id(0))).to(source_ptr.dtype.element_ty)
    tl.store(target + (at // width).to(tl.int64) * stride + at % width, value, at < size)


def spread(copies: Sequence[Copy], tables: dict[str, torch.Tensor], block: int = 2048) -> None:
    """target = scale * source for each copy. `tables` keeps the list of pieces on the device between calls."""
    flat = copies[0].source
    if "places" not in tables:
        rows, scales = [], []
        for source, target, scale in copies:
            assert source.is_contiguous() and source.dtype == target.dtype == flat.dtype and target.stride(1) == 1
            assert source.numel() < 2**31 - block, "the kernel counts in 32 bits"
            for first in range(0, source.numel(), block):
                place = (source.storage_offset(), target.data_ptr(), source.shape[1], target.stride(0), first)
                rows.append((*place, source.numel()))
                scales.append(scale)
        tables["places"] = torch.tensor(rows, dtype=torch.int64).to(flat.device)
        tables["scales"] = torch.tensor(scales, dtype=torch.float32).to(flat.device)
    whole = flat.as_strided((1,), (1,), 0)  # the start of the arena, from which offsets count
    _spread[(len(tables["places"]),)](whole, tables["places"], tables["scales"], B=block, num_warps=4)
