"""Training every weight by the kernels: the norm made again for a weight's gradient, bit for bit, and a whole step
against the references. Through the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from graftune.kernels import launch, lora_linear, rms_norm
from graftune.model.lora import build_arena
from graftune.runtime import resolve
from graftune.settings.config import LoraConfig
from graftune.weights.base import open_base
from graftune.weights.load import build_decoder
from graftune.weights.placement import Placement
from tests.kernels.test_whole_step import batch, stepped
from tests.support import oracle


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 48), (2, 1025)])
def test_the_norm_again_is_the_norm(shape, dtype, device, kernels_on):
    x = torch.randn(shape, device=device).to(dtype)
    weight = torch.rand(shape[1], device=device) + 0.5
    out = torch.full((shape[0], shape[1] + 3), float("nan"), dtype=dtype, device=device)[:, : shape[1]]
    _, rstd = rms_norm.add_forward(x, None, weight, 1e-5, out)
    again = rms_norm.apply(x, rstd, weight)
    assert torch.equal(again, out)
    reference = rms_norm.reference.apply(x, rstd, weight)
    assert torch.allclose(again.float(), reference.float(), rtol=1e-2 if dtype != torch.float32 else 1e-6)


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


def whole(path, device: str) -> oracle.Ours:
    base, runtime = open_base(str(path)), resolve(device, "fp32")
    arena = build_arena(base.spec, LoraConfig(), runtime.device, runtime.compute, full=True)
    decoder = build_decoder(base, arena, LoraConfig(), runtime, Placement("fp32", "test"))
    arena.publish()
    return oracle.Ours(base, decoder, arena, LoraConfig())


# A step through the interpreter takes 20 s: one there, all on a GPU.
EVERY = [("qwen3", "full"), ("llama", "none"), ("qwen2", "selective"), ("mistral-window", "none")]


@pytest.mark.parametrize(("variant", "recompute"), EVERY if torch.cuda.is_available() else EVERY[:1])
def test_a_step_equals_the_references(variant, recompute, shallow_folder, device, monkeypatch):
    cpu = whole(shallow_folder(variant), "cpu")
    want = stepped(cpu, "cpu", "cpu", batch(), 0.0, recompute)
    monkeypatch.setattr(launch, "fused", lambda x: True)
    monkeypatch.setattr(launch, "augments", lambda device: True)
    got = stepped(whole(shallow_folder(variant), device), device, "triton", batch(padded=True), 0.0, recompute)
    for (report, grads, weights), (report_, grads_, weights_) in zip(got, want, strict=True):
        assert torch.allclose(report, report_, rtol=1e-4), (report, report_)
        for name in cpu.arena.slots:
            a, b = cpu.arena.view(name, grads), cpu.arena.view(name, grads_)
            assert (a - b).norm() <= 2e-4 * (b.norm() + 1e-6), name
        assert (weights - weights_).norm() <= 1e-3 * weights_.norm()
