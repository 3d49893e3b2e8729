"""Products by group: each against a loop over the experts, with empty ones, in buffers full of NaN."""

from __future__ import annotations

import torch

from graftune.kernels import experts
from graftune.kernels.experts import Starts, reference
from tests.support.pairwise import pairwise

COUNTS = [(5, 0, 70, 1), (0, 0, 3), (1,), (64, 64, 0, 0, 0, 33)]
# Triton's interpreter multiplies the bits of bf16: fp16 takes the same tiles.
CLOSE = {torch.float32: 1e-5, torch.float16: 3e-3}


def starts_of(counts: tuple[int, ...], device: str) -> Starts:
    at = torch.tensor([0, *counts], device=device).cumsum(0, dtype=torch.int32)
    return Starts(at, tuple(at.tolist()))


def draw(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


@pairwise(("counts", COUNTS), ("depth, width", [(48, 40), (7, 4), (4, 130)]), ("dtype", CLOSE))
def test_multiply(counts, depth, width, dtype, device, kernels_on):
    starts = starts_of(counts, device)
    x = draw(sum(counts), depth + 3, dtype=dtype, device=device)[:, :depth]
    weight = draw(len(counts), width, depth, dtype=dtype, device=device)
    want = reference.multiply(x.float(), weight.float(), starts, None)
    assert (experts.multiply(x, weight, starts).float() - want).abs().max() <= CLOSE[dtype] * want.abs().max()
    bias = torch.randn(len(counts), width, device=device)
    added = reference.multiply(x.float(), weight.float(), starts, bias)
    assert (experts.multiply(x, weight, starts, bias).float() - added).abs().max() <= CLOSE[dtype] * added.abs().max()
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert (experts.multiply(x, turned, starts).float() - want).abs().max() <= CLOSE[dtype] * want.abs().max()
    y = draw(sum(counts), width, dtype=dtype, device=device)
    after = y.clone()
    experts.add_multiplied_(after, x, weight, starts, 0.5)
    want = y.float() + 0.5 * want
    assert (after.float() - want).abs().max() <= CLOSE[dtype] * want.abs().max()


@pairwise(("counts", COUNTS), ("height, width", [(4, 48), (70, 3), (33, 16)]), ("dtype", CLOSE))
def test_add_products(counts, height, width, dtype, device, kernels_on):
    starts = starts_of(counts, device)
    a = draw(sum(counts), height, dtype=dtype, device=device)
    b = draw(sum(counts), width, dtype=dtype, device=device)
    total = torch.randn(len(counts), height, width, device=device)
    want = total.clone()
    reference.add_products_(want, a.float(), b.float(), starts, 0.5)
    experts.add_products_(total, a, b, starts, 0.5)
    assert (total - want).abs().max() <= CLOSE[dtype] * want.abs().max()


def test_no_row_is_left_or_touched_twice(device, kernels_on):
    """The result is written into memory that is NaN before."""
    from graftune.kernels.experts import kernel

    starts = starts_of((3, 0, 65, 2), device)
    x, weight = torch.ones(70, 5, device=device), torch.ones(4, 6, 5, device=device)
    out = torch.full((71, 6), float("nan"), device=device)
    kernel.launch_multiply(x, weight, starts.at, out[:70], 1.0, add=False)
    assert bool((out[:70] == 5).all()) and bool(out[70].isnan().all())
