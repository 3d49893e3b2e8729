"""Products by group: each against a loop over the experts, with empty ones, in buffers full of NaN."""

from __future__ import annotations

import math

import pytest
import torch

from graftune.kernels import experts, routing
from graftune.kernels.experts import Starts, Terms, reference
from tests.support.pairwise import pairwise

COUNTS = [(5, 0, 70, 1), (0, 0, 3), (1,), (64, 64, 0, 0, 0, 33)]
# Triton's interpreter multiplies the bits of bf16: fp16 takes the same tiles.
CLOSE = {torch.float32: 1e-5, torch.float16: 3e-3}


def starts_of(counts: tuple[int, ...], device: str) -> Starts:
    at = torch.tensor([0, *counts], device=device).cumsum(0, dtype=torch.int32)
    return Starts(at, tuple(at.tolist()))


def draw(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


@pairwise(("counts", COUNTS), ("depth, width", [(48, 40), (7, 4), (4, 130)]), ("rank", [0, 3, 20]), ("dtype", CLOSE))
def test_multiply(counts, depth, width, rank, dtype, device, kernels_on):
    starts, tokens = starts_of(counts, device), 9
    x = draw(sum(counts), depth + 3, dtype=dtype, device=device)[:, :depth]
    weight = draw(len(counts), width, depth, dtype=dtype, device=device)
    assert close(experts.multiply(x, weight, starts), reference.multiply(x.float(), weight.float(), starts, Terms()))
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    x = draw(tokens, depth + 3, dtype=dtype, device=device)[:, :depth]
    low = up = None
    if rank:
        low = draw(sum(counts), rank, dtype=dtype, device=device)
        up = draw(len(counts), width, rank, dtype=dtype, device=device)
    terms = Terms(torch.randint(tokens, (sum(counts),), device=device), None, low, up, 0.5)
    exact = terms._replace(low=low if low is None else low.float(), up=up if up is None else up.float())
    for bias in (None, torch.randn(len(counts), width, device=device)):
        got = experts.multiply(x, turned, starts, terms._replace(bias=bias))
        assert close(got, reference.multiply(x.float(), weight.float(), starts, exact._replace(bias=bias)))


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((got.float() - want).abs().max() <= CLOSE[got.dtype] * want.abs().max())


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("dtype", CLOSE)
def test_combine(weighed, dtype, device, kernels_on):
    y, order = draw(35, 70, dtype=dtype, device=device), torch.randperm(35, device=device)
    weights = torch.rand(7, 5, device=device) if weighed else None
    places = order.view(7, 5)
    assert close(experts.combine(y, places, weights), reference.combine(y.float(), places, weights))


@pairwise(("counts", COUNTS), ("height, width", [(4, 48), (70, 3), (33, 16)]), ("dtype", CLOSE))
def test_add_products(counts, height, width, dtype, device, kernels_on):
    starts = starts_of(counts, device)
    a = draw(sum(counts), height, dtype=dtype, device=device)
    b = draw(sum(counts), width, dtype=dtype, device=device)
    total = torch.randn(len(counts), height, width, device=device)
    want = total.clone()
    reference.add_products_(want, a.float(), b.float(), starts, 0.5, None, None)
    experts.add_products_(total, a, b, starts, 0.5)
    assert (total - want).abs().max() <= CLOSE[dtype] * want.abs().max()
    few = draw(6, width, dtype=dtype, device=device)
    rows = torch.randint(6, (sum(counts),), device=device)
    experts.add_products_(total, a, few, starts, b_rows=rows)
    reference.add_products_(want, a.float(), few.float(), starts, 1.0, None, rows)
    assert (total - want).abs().max() <= CLOSE[dtype] * want.abs().max()
    rows = rows.flip(0)
    experts.add_products_(total.transpose(1, 2), few, a, starts, a_rows=rows)
    reference.add_products_(want.transpose(1, 2), few.float(), a.float(), starts, 1.0, rows, None)
    assert (total - want).abs().max() <= CLOSE[dtype] * want.abs().max()


def test_no_row_is_left_or_touched_twice(device, kernels_on):
    """The result is written into memory that is NaN before."""
    from graftune.kernels.experts import kernel

    starts = starts_of((3, 0, 65, 2), device)
    x, weight = torch.ones(70, 5, device=device), torch.ones(4, 6, 5, device=device)
    out = torch.full((71, 6), float("nan"), device=device)
    kernel.launch_multiply(x, weight, starts.at, out[:70], Terms())
    assert bool((out[:70] == 5).all()) and bool(out[70].isnan().all())


@pairwise(("tokens", [1, 37, 130]), ("experts", [3, 8, 130]), ("chosen", [1, 3]), ("wider", [0, 5]))
def test_sums_over_a_routers_choices(tokens, experts, chosen, wider, device, kernels_on):
    """The kernel against the reference, and the reference against a loop over the tokens."""
    scores = torch.rand(tokens, experts, device=device)
    scores[0, 0] = 0.0  # adds nothing to the entropy
    choice = torch.rand(tokens, experts, device=device).topk(chosen, 1).indices
    counted = torch.rand(tokens, device=device) < 0.7
    before = torch.randn(routing.PARTS, experts + 2 + wider, device=device)
    sums, want = before.clone(), before.clone()
    routing.add_(sums, scores, choice, counted)
    routing.reference.add_(want, scores, choice, counted)
    assert (sums.sum(0) - want.sum(0)).abs().max() < 1e-3
    gone = (want - before).sum(0)
    kept = [token for token in range(tokens) if counted[token]]
    counts = [sum(int(expert in choice[token]) for token in kept) for expert in range(experts)]
    entropy = 0.0
    for token in kept:
        p = (scores[token] / scores[token].sum()).tolist()
        entropy -= sum(each * math.log(each) for each in p if each)
    assert (gone - torch.tensor([*counts, *[0.0] * wider, entropy, len(kept)], device=device)).abs().max() < 1e-3
