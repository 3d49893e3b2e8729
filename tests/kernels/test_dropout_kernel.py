"""The kernel drops what the reference drops, to the bit; and what is dropped looks like chance."""

from __future__ import annotations

import math

import pytest
import torch

from graftune.kernels import dropout
from graftune.kernels.dropout import reference


def kept(p: float, seed: int, mask_id: int, size: int = 1 << 17) -> torch.Tensor:
    return (dropout.apply(torch.ones(size), p, torch.tensor(seed), mask_id) != 0).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (65, 67), (8192,)])
@pytest.mark.parametrize(
    ("p", "seed", "mask_id"), [(0.1, 0, 0), (0.5, 2**63 - 1, 255), (0.9, -(2**40) - 7, 1), (0, 5, 16)]
)
def test_bit_for_bit(kernels_on, device, shape, dtype, p, seed, mask_id):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(mask_id)).to(dtype)
    x.view(-1)[0] = float("inf")  # dropped means zero, whatever it was
    got = dropout.apply(x.to(device), p, torch.tensor(seed, device=device), mask_id).cpu()
    want = reference.apply(x, p, torch.tensor(seed), mask_id)
    exact = (x.float() * torch.tensor(1 / (1 - p), dtype=torch.float32)).to(dtype)
    assert torch.equal(want, torch.where(want == 0, 0, exact))
    if dtype == torch.bfloat16 and device == "cpu":  # Triton's interpreter cuts bf16 off instead of rounding it
        assert torch.equal(got == 0, want == 0) and torch.allclose(got, want, rtol=2**-7)
    else:
        assert torch.equal(got, want)


def test_a_long_tensor_goes_on_where_its_chunks_end(kernels_on, device, monkeypatch):
    x = torch.ones(5000)
    got = dropout.apply(x.to(device), 0.3, torch.tensor(11, device=device), 9).cpu()
    monkeypatch.setattr(reference, "CHUNK", 64)
    assert torch.equal(got, reference.apply(x, 0.3, torch.tensor(11), 9))
    assert torch.equal(got[:77], reference.apply(x[:77], 0.3, torch.tensor(11), 9))


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_the_share_kept(p):
    for seed, mask_id in [(0, 0), (1, 0), (0, 1), (2**32, 0), (12345678901, 77)]:
        mask = kept(p, seed, mask_id)
        assert abs(mask.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / len(mask))


def test_seeds_and_places_are_independent():
    keys = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 2), (2**32, 0), (2**32 + 1, 1), (-1, 0), (2**31, 3), (7, 8)]
    masks = torch.stack([kept(0.5, *key) - 0.5 for key in keys])
    correlations = (masks @ masks.t()) / (0.25 * masks.shape[1])
    correlations.fill_diagonal_(0)
    assert correlations.abs().max() < 5 / math.sqrt(masks.shape[1])
