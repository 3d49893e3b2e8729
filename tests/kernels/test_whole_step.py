"""A whole optimizer step by the kernels, adapters beside the weights, against the references on the CPU: loss, every
gradient and the weights after the update. Through the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from graftune.batch import Example
from graftune.data.pack import pack
from graftune.kernels import launch
from graftune.model import projection
from graftune.settings.config import LoraConfig
from graftune.step.step import Step
from tests.support import oracle, tiny

# A large epsilon: at 1e-8 the first update is the gradient's sign, and a gradient of nearly nothing has any.
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 0.1, "weight_decay": 0.01, "clip": 0.7}


def batch(padded: bool = False):
    """Two documents, with or without the padding of a captured step: tokens, an empty slot, rows."""
    tokens = torch.randint(3, tiny.VOCAB, (2, 8), generator=torch.Generator().manual_seed(4)).tolist()
    examples = [Example(t[: 8 - 3 * i], [j > 2 for j in range(8 - 3 * i)]) for i, t in enumerate(tokens)]
    return pack(examples, capacity=15, max_docs=3, max_rows=9) if padded else pack(examples)


def stepped(side, device: str, backend: str, packed, dropout: float, recompute: str = "none", steps: int = 1):
    step = Step(
        side.decoder, side.arena, clip_mode="layer", dropout=dropout, attention_backend=backend, recompute=recompute
    )
    found = []
    for _ in range(steps):
        step.set_dropout_seed(11)
        step.micro_step(packed.to(torch.device(device)))
        step.set_hyper(HYPER | {"divisor": float(packed.response_tokens)})
        grads = side.arena.grads.cpu().clone()
        report = step.update_step().cpu().clone()
        found.append((report, grads, side.arena.weights.cpu().clone()))
        assert not side.arena.grads.any()
    return found


@pytest.mark.parametrize(
    ("variant", "lora", "dropout", "recompute"),
    [
        ("qwen2", LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj")), 0.0, "selective"),
        ("qwen3", LoraConfig(rank=4, alpha=8.0, train_norms=True), 0.0, "full"),
        ("mistral-window", LoraConfig(rank=2, alpha=8.0), 0.3, "none"),
        ("llama-untied", LoraConfig(rank=25, alpha=10.0, targets=("k_proj", "gate_proj")), 0.2, "selective"),
    ],
)
def test_step_equals_the_references(variant, lora, dropout, recompute, shallow_folder, device, monkeypatch):
    check(variant, lora, dropout, recompute, shallow_folder, device, monkeypatch)


def test_two_steps_in_a_row(shallow_folder, device, monkeypatch):
    lora = LoraConfig(rank=70, alpha=70.0, targets=("k_proj", "up_proj", "o_proj"))
    check("llama", lora, 0.0, "none", shallow_folder, device, monkeypatch, steps=2)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_long_batches_read_gradients_once(dropout, shallow_folder, device, monkeypatch):
    monkeypatch.setattr(projection, "LONG", 1)
    lora = LoraConfig(rank=4, alpha=10.0, targets=("q_proj", "v_proj", "down_proj"))
    check("qwen2", lora, dropout, "none", shallow_folder, device, monkeypatch)


@pytest.mark.parametrize(
    ("variant", "lora", "dropout", "recompute"),
    [
        ("gemma2", LoraConfig(rank=4, alpha=8.0, train_norms=True), 0.0, "none"),
        ("gemma3-short", LoraConfig(rank=2, alpha=8.0), 0.2, "selective"),
        ("phi3-long", LoraConfig(rank=4, alpha=8.0), 0.0, "selective"),
        ("granite", LoraConfig(rank=3, alpha=6.0), 0.0, "none"),
        ("olmo3-short", LoraConfig(rank=4, alpha=8.0, train_norms=True), 0.0, "none"),
        ("lfm2-short", LoraConfig(rank=2, alpha=8.0, train_norms=True), 0.2, "full"),
    ],
)
def test_families_that_differ_more(variant, lora, dropout, recompute, shallow_folder, device, monkeypatch):
    check(variant, lora, dropout, recompute, shallow_folder, device, monkeypatch)


def check(variant, lora, dropout, recompute, shallow_folder, device, monkeypatch, steps=1):
    cpu = oracle.ours(shallow_folder(variant), lora)
    start = cpu.arena.weights.clone()
    want = stepped(cpu, "cpu", "cpu", batch(), dropout, recompute, steps)
    monkeypatch.setattr(launch, "fused", lambda x: True)
    monkeypatch.setattr(launch, "augments", lambda device: True)
    ours = oracle.ours(shallow_folder(variant), lora, device=device)
    ours.arena.weights.copy_(start)
    ours.arena.publish()
    columns = [p.adapter_columns for b in ours.decoder.blocks for p in b.projections if p.lora is not None]
    assert columns and all(columns), "adapters lie beside the weights"
    got = stepped(ours, device, "triton", batch(padded=True), dropout, recompute, steps)
    for (report, grads, weights), (report_, grads_, weights_) in zip(got, want, strict=True):
        assert torch.allclose(report, report_, rtol=1e-4), (report, report_)
        for name in cpu.arena.slots:
            a, b = cpu.arena.view(name, grads), cpu.arena.view(name, grads_)
            assert (a - b).norm() <= 1e-4 * (b.norm() + 1e-6), name
        assert (weights - weights_).norm() <= 1e-3 * weights_.norm()
