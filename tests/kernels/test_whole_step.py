"""A whole optimizer step by the kernels, adapters beside the weights, against the references on the CPU: loss, every
gradient and the weights after the update. Through the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from graftune.model import projection
from graftune.settings.sections import LoraConfig
from tests.kernels.harness import batch, same_steps, start_from, stepped, through_kernels
from tests.support import oracle
from tests.support.thorough import THOROUGH

# On a GPU, and with GRAFTUNE_EXAMPLES=1000, two more: their parts are in others of these.
MORE = [
    ("olmo3-short", LoraConfig(rank=4, alpha=8.0, train_norms=True), 0.0, "none"),
    ("lfm3-short", LoraConfig(rank=4, alpha=8.0, train_norms=True), 0.0, "selective"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("variant", "lora", "dropout", "recompute"),
    [
        ("qwen2", LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj")), 0.0, "selective"),
        ("qwen3", LoraConfig(rank=4, alpha=8.0, train_norms=True), 0.0, "full"),
        ("gemma2", LoraConfig(rank=4, alpha=8.0, train_norms=True), 0.0, "none"),
        ("phi3-long", LoraConfig(rank=25, alpha=10.0), 0.2, "selective"),
        ("lfm2-short", LoraConfig(rank=2, alpha=8.0, train_norms=True), 0.2, "full"),
        ("qwen3_5-short", LoraConfig(rank=4, alpha=8.0, train_norms=True), 0.0, "selective"),
        *(MORE if THOROUGH or torch.cuda.is_available() else ()),
    ],
)
def test_step_equals_the_references(variant, lora, dropout, recompute, shallow_folder, device, monkeypatch):
    check(variant, lora, dropout, recompute, shallow_folder, device, monkeypatch)


@pytest.mark.thorough
def test_two_steps_in_a_row(shallow_folder, device, monkeypatch):
    lora = LoraConfig(rank=70, alpha=70.0, targets=("k_proj", "up_proj", "o_proj"))
    check("llama", lora, 0.0, "none", shallow_folder, device, monkeypatch, steps=2)


@pytest.mark.parametrize("dropout", [0.0, 0.2] if THOROUGH else [0.2])
def test_long_batches_read_gradients_once(dropout, shallow_folder, device, monkeypatch):
    monkeypatch.setattr(projection, "LONG", 1)
    lora = LoraConfig(rank=4, alpha=10.0, targets=("q_proj", "v_proj", "down_proj"))
    check("qwen2", lora, dropout, "none", shallow_folder, device, monkeypatch)


def check(variant, lora, dropout, recompute, shallow_folder, device, monkeypatch, steps=1):
    cpu = oracle.ours(shallow_folder(variant), lora)
    start = cpu.arena.weights.clone()
    want = stepped(cpu, "cpu", "cpu", batch(), dropout, recompute, steps)
    through_kernels(monkeypatch)
    ours = oracle.ours(shallow_folder(variant), lora, device=device)
    start_from(ours, start)
    columns = [p.adapter_columns for b in ours.decoder.blocks for p in b.projections if p.lora is not None]
    assert columns and all(columns), "adapters lie beside the weights"
    got = stepped(ours, device, "triton", batch(padded=True), dropout, recompute, steps)
    same_steps(cpu.arena, got, want)
