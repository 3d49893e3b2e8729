"""A whole optimizer step over quantised bases by the kernels: each product's weight is dequantised into the scratch
and the adapters are written beside and below it. Against the references over the same base dequantised to fp32.
Through the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from graftune.kernels import augmented_weight
from graftune.kernels.augmented_weight import Adapters, reference
from graftune.model.frozen import Dense, Table, Unpacked
from graftune.settings.sections import LoraConfig
from graftune.weights import load
from graftune.weights.base import open_base
from tests.kernels.harness import NAN, batch, same_steps, start_from, stepped, through_kernels
from tests.support import quantised

QV = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))
ALL = LoraConfig(rank=4, alpha=10.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("columns", "out", "width", "rank", "size"),
    [
        (((0, 5),), 5, 7, 1, 8),
        (((0, 30), (40, 50)), 50, 24, 4, 8),
        (((0, 300), (300, 340), (340, 380)), 380, 130, 16, 48),
        (((10, 20), (20, 33)), 40, 5000, 3, 8),
        (((10, 20), (20, 33)), 40, 24, 70, 144),
        (((0, 9), (9, 10), (20, 30), (31, 40)), 40, 24, 5, 24),
    ],
)
def test_adapters_beside_and_below_a_weight(columns, out, width, rank, size, dtype, device, kernels_on):
    """All of the adapter columns or rows are written, whatever was in them; nothing else is."""
    rows = sum(stop - start for start, stop in columns)
    down = torch.randn(rank * len(columns), width, device=device).to(dtype)
    up = torch.randn(rows, rank, device=device).to(dtype)
    adapters = Adapters(down, up, columns, 2.0)
    for place, side in (("beside", (slice(out), slice(width, None))), ("below", (slice(out, None), slice(width)))):
        storage, want = (torch.full((out + size, width + size), NAN, dtype=dtype, device=device) for _ in range(2))
        getattr(augmented_weight, place)(storage[side], adapters)
        getattr(reference, place)(want[side], adapters)
        assert torch.equal(storage.nan_to_num(7e4), want.nan_to_num(7e4))
        assert not storage[side].isnan().any() and storage.isnan().sum() == storage.numel() - storage[side].numel()


def check(side, wanted, start, device, dropout, recompute="none") -> None:
    """`side`, over a quantised base, takes the steps that were `wanted`."""
    start_from(side, start)
    packed = [p for b in side.decoder.blocks for p in b.projections]
    assert all(isinstance(p.frozen, Unpacked) for p in packed)
    assert all(bool(p.adapter_columns) == (p.lora is not None) for p in packed) and any(
        p.adapter_columns for p in packed
    )
    for p in packed:
        p.frozen.storage.fill_(NAN)  # what a product does not write it may not read
    got = stepped(side, device, "triton", batch(padded=True), dropout, recompute)
    same_steps(side.arena, got, wanted)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("variant", "lora", "dropout"), [("llama", ALL, 0.0), ("qwen2", QV, 0.3)], ids=["llama", "qwen2-dropout"]
)
def test_nf4(variant, lora, dropout, shallow_folder, device, monkeypatch):
    base = open_base(str(shallow_folder(variant)))
    cpu = quantised.placed(quantised.through_nf4(base), lora, "fp32")
    start = cpu.arena.weights.clone()
    wanted = stepped(cpu, "cpu", "cpu", batch(), dropout)
    through_kernels(monkeypatch)
    ours = quantised.placed(base, lora, "nf4", device)
    assert isinstance(ours.decoder.embedding, Dense)
    check(ours, wanted, start, device, dropout)


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
    start = cpu.arena.weights.clone()
    wanted = stepped(cpu, "cpu", "cpu", batch(), dropout, recompute)
    through_kernels(monkeypatch)
    monkeypatch.setattr(load, "TABLE_VALUES", 1)  # a table then takes more than one piece of the scratch
    ours = quantised.placed(base, lora, "keep", device)
    assert isinstance(ours.decoder.embedding, Table) == (kind != "Q4_K") and ours.decoder.embedding.kind == table
    check(ours, wanted, start, device, dropout, recompute)
    names = [name for name in base.tensors if name.endswith("_proj.weight")]
    assert sum(p.frozen.nbytes for b in ours.decoder.blocks for p in b.projections) == sum(
        base.tensors[name].nbytes for name in names
    )
