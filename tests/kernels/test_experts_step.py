"""A whole optimizer step of a mixture of experts by the kernels, against the references on the CPU: no count of rows is
read on the host. Resident, in NF4, and through the interpreter where there is no GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from graftune.kernels.experts import Starts
from graftune.model.feed_forward.expert_projection import Stacked
from graftune.model.feed_forward.experts import Experts
from graftune.settings.sections import LoraConfig
from graftune.weights.base import open_base
from tests.kernels.harness import batch, same_steps, start_from, stepped, through_kernels
from tests.support import moe, quantised

ALL = LoraConfig(rank=4, alpha=10.0, targets=("all_linear",))
DOWN = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "down_proj"), train_norms=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moe.make_folder("qwen3_moe-small", tmp_path_factory.mktemp("moe") / "qwen3_moe")


def never(self: Starts) -> None:
    raise AssertionError("the kernels read no count on the host")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("base_dtype", "lora", "recompute"),
    [("fp32", DOWN, "full"), ("nf4", ALL, "selective")],
    ids=["fp32-down", "nf4"],
)
def test_step_equals_the_references(base_dtype, lora, recompute, folder, device, monkeypatch):
    base = open_base(str(folder))
    plain = quantised.through_nf4(base) if base_dtype == "nf4" else base
    cpu = quantised.placed(plain, lora, "fp32")
    start = cpu.arena.weights.clone()
    wanted = stepped(cpu, "cpu", "cpu", batch(), 0.0, recompute)
    through_kernels(monkeypatch)
    monkeypatch.setattr(Starts, "groups", never)
    ours = quantised.placed(base, lora, base_dtype, device)
    start_from(ours, start)
    for block in ours.decoder.blocks:
        assert isinstance(block.feed_forward, Experts) and isinstance(block.feed_forward.down.weights, Stacked)
    got = stepped(ours, device, "triton", batch(padded=True), 0.0, recompute)
    same_steps(ours.arena, got, wanted)


def test_gpt_oss_on_its_own_mxfp4(tmp_path, device, monkeypatch):
    """Sinks, a window, biases, the clamped unit, and experts that are dequantised for each product."""
    base = open_base(str(moe.make_folder("gpt_oss-small-mxfp4", tmp_path / "base")))
    cpu = quantised.placed(quantised.dequantised(base), ALL, "fp32")
    start = cpu.arena.weights.clone()
    wanted = stepped(cpu, "cpu", "cpu", batch(), 0.0, "full")
    through_kernels(monkeypatch)
    monkeypatch.setattr(Starts, "groups", never)
    ours = quantised.placed(base, ALL, "keep", device)
    start_from(ours, start)
    weights = ours.decoder.blocks[0].feed_forward.gate_up.weights
    assert isinstance(weights, Stacked) and weights.kind == "MXFP4" and len(weights.frozen.members) == 1
    head, scratch = ours.decoder.head, ours.decoder.scratch
    rows = torch.randn(9, 64, device=device)
    lent = dataclasses.replace(head, scratch=scratch).matmul(rows)
    assert lent.data_ptr() == scratch.flat.data_ptr(), "a loss has its logits where experts are dequantised"
    assert torch.equal(lent, head.matmul(rows)) and head.matmul(rows).data_ptr() != lent.data_ptr()
    got = stepped(ours, device, "triton", batch(padded=True), 0.0, "full")
    same_steps(ours.arena, got, wanted)


@pytest.mark.thorough
def test_a_shared_expert_beside_delta_nets(tmp_path, device, monkeypatch):
    """Qwen3-Next: the gate of the shared expert, two input projections of the delta net, a norm that two parts read."""
    base = open_base(str(moe.make_folder("qwen3_next-small", tmp_path / "base")))
    lora = LoraConfig(rank=3, alpha=6.0, targets=("all_linear",), train_norms=True)
    cpu = quantised.placed(quantised.through_nf4(base), lora, "fp32")
    start = cpu.arena.weights.clone()
    wanted = stepped(cpu, "cpu", "cpu", batch(), 0.0, "selective")
    through_kernels(monkeypatch)
    monkeypatch.setattr(Starts, "groups", never)
    ours = quantised.placed(base, lora, "nf4", device)
    start_from(ours, start)
    same_steps(ours.arena, stepped(ours, device, "triton", batch(padded=True), 0.0, "selective"), wanted)
