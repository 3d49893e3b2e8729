"""A whole optimizer step by the kernels, adapters beside the weights, against the references on the CPU: loss, every
gradient and the weights after the update; of adapters and of every weight, over quantised bases against the same base
dequantised, and of mixtures of experts. Through the interpreter where there is no GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graftune.kernels.experts import Starts
from graftune.model import projection
from graftune.model.feed_forward.expert_projection import Stacked
from graftune.model.feed_forward.experts import Experts
from graftune.model.frozen import Dense, Table, Unpacked
from graftune.settings.sections import LoraConfig
from graftune.weights import load
from graftune.weights.base import open_base
from tests.kernels.harness import NAN, check_steps
from tests.support import moe, oracle, quantised, tiny
from tests.support.thorough import THOROUGH

QV = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))
ALL = LoraConfig(rank=4, alpha=10.0)
LINEAR = LoraConfig(rank=4, alpha=10.0, targets=("all_linear",))
DOWN = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "down_proj"), train_norms=True)
# On a GPU, and with GRAFTUNE_EXAMPLES=1000, two more: their parts are in others of these.
MORE = [
    ("olmo3-short", LoraConfig(rank=4, alpha=8.0, train_norms=True), 0.0, "none"),
    ("lfm3-short", LoraConfig(rank=4, alpha=8.0, train_norms=True), 0.0, "selective"),
]


@pytest.mark.few(1)
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
    if not tiny.in_transformers(variant):
        pytest.skip(f"the transformers of this machine has no {variant}")
    check(variant, lora, dropout, recompute, shallow_folder, device, monkeypatch)


@pytest.mark.thorough
def test_two_steps_in_a_row(shallow_folder, device, monkeypatch):
    lora = LoraConfig(rank=70, alpha=70.0, targets=("k_proj", "up_proj", "o_proj"))
    check("llama", lora, 0.0, "none", shallow_folder, device, monkeypatch, steps=2)


@pytest.mark.parametrize("dropout", [0.0, 0.2] if THOROUGH else [0.2])
@pytest.mark.thorough
def test_long_batches_read_gradients_once(dropout, shallow_folder, device, monkeypatch):
    monkeypatch.setattr(projection, "LONG", 1)
    lora = LoraConfig(rank=4, alpha=10.0, targets=("q_proj", "v_proj", "down_proj"))
    check("qwen2", lora, dropout, "none", shallow_folder, device, monkeypatch)


def check(variant, lora, dropout, recompute, shallow_folder, device, monkeypatch, steps=1):
    folder = shallow_folder(variant)
    ours = check_steps(
        monkeypatch, oracle.ours(folder, lora), lambda: oracle.ours(folder, lora, device=device), device, dropout,
        recompute, steps,
    )  # fmt: skip
    columns = [p.adapter_columns for b in ours.decoder.blocks for p in b.projections if p.lora is not None]
    assert columns and all(columns), "adapters lie beside the weights"


# A step through the interpreter takes 20 s: one there, all on a GPU.
EVERY = [("qwen3", "full"), ("llama", "none"), ("qwen2", "selective"), ("mistral-window", "none")]


@pytest.mark.parametrize(("variant", "recompute"), EVERY if torch.cuda.is_available() else EVERY[:1])
def test_every_weight(variant, recompute, shallow_folder, device, monkeypatch):
    cpu = oracle.whole(shallow_folder(variant), "cpu")
    made = lambda: oracle.whole(shallow_folder(variant), device)  # noqa: E731
    check_steps(monkeypatch, cpu, made, device, recompute=recompute, tolerance=2e-4)


# Over quantised bases, of which each product's weight is dequantised into the scratch


def packed(side: Any) -> Any:
    """A side over a quantised base, whose scratch is full of NaN: what a product does not write it may not read."""
    projections = [p for b in side.decoder.blocks for p in b.projections]
    assert all(isinstance(p.frozen, Unpacked) for p in projections)
    assert all(bool(p.adapter_columns) == (p.lora is not None) for p in projections)
    assert any(p.adapter_columns for p in projections)
    for p in projections:
        p.frozen.storage.fill_(NAN)
    return side


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("variant", "lora", "dropout"), [("llama", ALL, 0.0), ("qwen2", QV, 0.3)], ids=["llama", "qwen2-dropout"]
)
def test_nf4(variant, lora, dropout, shallow_folder, device, monkeypatch):
    base = open_base(str(shallow_folder(variant)))
    cpu = quantised.placed(quantised.through_nf4(base), lora, "fp32")
    ours = check_steps(
        monkeypatch, cpu, lambda: packed(quantised.placed(base, lora, "nf4", device)), device, dropout
    )  # fmt: skip
    assert isinstance(ours.decoder.embedding, Dense)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "table", "mixed", "lora", "dropout", "recompute"),
    [
        ("Q4_1", "Q8_0", "", ALL, 0.0, "full"),
        ("MXFP4", "Q4_1", "F16", QV, 0.2, "selective"),
        ("Q4_K", "Q6_K", "Q5_K", ALL, 0.0, "none"),
    ],
    ids=["Q4_1", "MXFP4-dropout", "Q4_K"],
)
def test_gguf_blocks(kind, table, mixed, lora, dropout, recompute, device, monkeypatch):
    heads = {"heads": 2, "kv_heads": 1, "head_width": 128 if kind == "Q4_K" else 32}
    few = {"layers": 1, "vocab": 272} if kind == "Q4_K" else {"tied": kind == "MXFP4"}
    shape = quantised.spec(256 if kind == "Q4_K" else 64, **few, **heads)
    base = quantised.gguf_base(kind, shape, table, mixed)
    cpu = quantised.placed(quantised.dequantised(base), lora, "fp32")
    monkeypatch.setattr(load, "TABLE_VALUES", 1)  # a table then takes more than one piece of the scratch
    ours = check_steps(
        monkeypatch, cpu, lambda: packed(quantised.placed(base, lora, "keep", device)), device, dropout, recompute
    )
    assert isinstance(ours.decoder.embedding, Table) == (kind != "Q4_K") and ours.decoder.embedding.kind == table
    names = [name for name in base.tensors if name.endswith("_proj.weight")]
    assert sum(p.frozen.nbytes for b in ours.decoder.blocks for p in b.projections) == sum(
        base.tensors[name].nbytes for name in names
    )


# Mixtures of experts, of which the kernels read no count of rows on the host


@pytest.fixture
def without_counts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Places a base whose products by group are the kernels' alone."""

    def never(self: Starts) -> None:
        raise AssertionError("the kernels read no count on the host")

    def placed(*how: Any) -> Any:
        monkeypatch.setattr(Starts, "groups", never)
        return quantised.placed(*how)

    return placed


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("base_dtype", "lora", "recompute"), [("fp32", DOWN, "full"), ("nf4", LINEAR, "selective")], ids=["fp32", "nf4"]
)
def test_experts(base_dtype, lora, recompute, tmp_path, device, monkeypatch, without_counts):
    base = open_base(str(moe.make_folder("qwen3_moe-small", tmp_path / "base")))
    cpu = quantised.placed(quantised.through_nf4(base) if base_dtype == "nf4" else base, lora, "fp32")
    made = lambda: without_counts(base, lora, base_dtype, device)  # noqa: E731
    ours = check_steps(monkeypatch, cpu, made, device, recompute=recompute)
    for block in ours.decoder.blocks:
        assert isinstance(block.feed_forward, Experts) and isinstance(block.feed_forward.down.weights, Stacked)


def test_gpt_oss_on_its_own_mxfp4(tmp_path, device, monkeypatch, without_counts):
    """Sinks, a window, biases, the clamped unit, and experts that are dequantised for each product."""
    base = open_base(str(moe.make_folder("gpt_oss-small-mxfp4", tmp_path / "base")))
    cpu = quantised.placed(quantised.dequantised(base), LINEAR, "fp32")
    made = lambda: without_counts(base, LINEAR, "keep", device)  # noqa: E731
    ours = check_steps(monkeypatch, cpu, made, device, recompute="full")
    weights = ours.decoder.blocks[0].feed_forward.gate_up.weights
    assert isinstance(weights, Stacked) and weights.kind == "MXFP4" and len(weights.frozen.members) == 1
    head, scratch = ours.decoder.head, ours.decoder.scratch
    rows = torch.randn(9, 64, device=device)
    lent = dataclasses.replace(head, scratch=scratch).matmul(rows)
    assert lent.data_ptr() == scratch.flat.data_ptr(), "a loss has its logits where experts are dequantised"
    assert torch.equal(lent, head.matmul(rows)) and head.matmul(rows).data_ptr() != lent.data_ptr()


@pytest.mark.thorough
def test_a_shared_expert_beside_delta_nets(tmp_path, device, monkeypatch, without_counts):
    """Qwen3-Next: the gate of the shared expert, two input projections of the delta net, a norm that two parts read."""
    base = open_base(str(moe.make_folder("qwen3_next-small", tmp_path / "base")))
    lora = LoraConfig(rank=3, alpha=6.0, targets=("all_linear",), train_norms=True)
    cpu = quantised.placed(quantised.through_nf4(base), lora, "fp32")
    check_steps(monkeypatch, cpu, lambda: without_counts(base, lora, "nf4", device), device, recompute="selective")
