"""One pass over x: each element hashes its own index, so no state is needed and the order does not matter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.dropout.reference import keep_from, scaling

BLOCK = 2048


@triton.jit
def _mix(x):
    """`reference.mix_` in wrapping 32-bit arithmetic."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@launch.kernel(do_not_specialize=["mask_id", "threshold"])
def _apply(x_ptr, out_ptr, seed_ptr, mask_id, threshold, scale, count, BLOCK: tl.constexpr):
    seed = tl.load(seed_ptr)
    seed_low, seed_high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    word = mask_id.to(tl.uint32)
    first = _mix(_mix(_mix(word ^ 0x9E3779B9) ^ seed_low) ^ seed_high)
    second = _mix(_mix(_mix(word ^ 0x85EBCA6B) ^ seed_low) ^ seed_high)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    hashed = _mix(_mix(at.to(tl.uint32) ^ first) ^ second)
    x = tl.load(x_ptr + at, at < count, other=0.0).to(tl.float32)
    y = tl.where(hashed >= threshold.to(tl.uint32), x * scale, 0.0)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), at < count)


def apply(x: torch.Tensor, p: float, seed: torch.Tensor, mask_id: int) -> torch.Tensor:
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), BLOCK),)
        _apply[grid](x, out, seed, mask_id, keep_from(p), scaling(p), x.numel(), BLOCK=BLOCK, num_warps=4)
    return out
