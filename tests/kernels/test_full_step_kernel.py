"""Training every weight by the kernels: products that add up in fp32, and a whole step against the references. Through
the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from graftune.kernels import lora_linear
from tests.kernels.harness import batch, same_steps, stepped, through_kernels
from tests.support import oracle


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_add_up_in_fp32(dtype, device):
    """A thousand times the same small product: a sum in 16 bits would stop growing."""
    a, b = torch.randn(33, 24, device=device).to(dtype), torch.randn(33, 16, device=device).to(dtype)
    wide = torch.full((24, 16 + 5), 100.0, device=device)
    total = wide[:, :16].contiguous()
    for _ in range(1000):
        lora_linear.add_product_(total, a.t(), b, 1e-3)
    want = 100.0 + a.double().t() @ b.double()
    assert total.dtype == torch.float32
    assert (total - want).abs().max() < (1e-2 if dtype == torch.float32 or device == "cuda" else 0.1)


# A step through the interpreter takes 20 s: one there, all on a GPU.
EVERY = [("qwen3", "full"), ("llama", "none"), ("qwen2", "selective"), ("mistral-window", "none")]


@pytest.mark.parametrize(("variant", "recompute"), EVERY if torch.cuda.is_available() else EVERY[:1])
def test_a_step_equals_the_references(variant, recompute, shallow_folder, device, monkeypatch):
    cpu = oracle.whole(shallow_folder(variant), "cpu")
    want = stepped(cpu, "cpu", "cpu", batch(), 0.0, recompute)
    through_kernels(monkeypatch)
    got = stepped(oracle.whole(shallow_folder(variant), device), device, "triton", batch(padded=True), 0.0, recompute)
    same_steps(cpu.arena, got, want, tolerance=2e-4)
