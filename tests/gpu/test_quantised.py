"""Quantised bases on CUDA: blocks and codes live on the device, steps over them are captured like any other, and they
train as the same base does when it is dequantised first. All without a wait for the device inside a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.synthetic import random_base

from graftune.api import train
from graftune.data.pack import pack
from graftune.errors import GraftuneError
from graftune.kernels import attention
from graftune.kernels.gguf_dequant import KINDS
from graftune.model.frozen import Dense, Table, Unpacked
from graftune.observe.console import Console
from graftune.observe.events import evals, read_events
from graftune.settings.config import Config
from graftune.settings.sections import LoraConfig
from graftune.step.pipeline import DevicePipeline
from graftune.step.step import Step
from graftune.weights.base import Base, default_base
from graftune.weights.load import scratch_values
from tests.gpu.test_step import HYPER, SHAPE, examples
from tests.support import oracle, quantised
from tests.training.runs import write_data

pytestmark = pytest.mark.gpu
LORA = LoraConfig(rank=4, alpha=8.0)
EVERY = ["nf4", *(kind for kind in KINDS if kind != "F32")]
# (projections, embedding and head): large and small blocks, both ways of a minimum, a curve, and NF4.
SOME = [("nf4", ""), ("Q4_1", "Q8_0"), ("Q8_0", "F16"), ("Q4_K", "Q6_K"), ("IQ4_XS", "Q5_K")]


def base_of(kind: str, table: str = "Q8_0", layers: int = 2) -> tuple[Base, str]:
    """(base, what base_dtype makes it train in its kind)"""
    shape = quantised.spec(256, layers=layers)
    if kind == "nf4":
        return quantised.dequantised(quantised.gguf_base("F16", shape, "F16")), "nf4"
    return quantised.gguf_base(kind, shape, table), "keep"


def dequantised_of(base: Base, base_dtype: str) -> Base:
    return quantised.through_nf4(base) if base_dtype == "nf4" else quantised.dequantised(base)


def ready(ours: oracle.Ours, *, graph: bool, deterministic: bool = False, **more: Any) -> tuple[Step, DevicePipeline]:
    head, compute = ours.decoder.spec.attention[0].head_width, ours.arena.compute_dtype
    backend = attention.choose(torch.device("cuda"), compute, head, deterministic, False).backend
    tuned = not deterministic and compute != torch.float32
    step = Step(ours.decoder, ours.arena, attention_backend=backend, longest=64, tuned=tuned, **more)
    return step, DevicePipeline(step, graph)


def trained(
    ours: oracle.Ours, steps: int, **how: Any
) -> tuple[list[tuple[float, float]], torch.Tensor, DevicePipeline]:
    """(loss, gradient norm) of each step, the weights after them. From the second on, sending a step may not wait."""
    _, loop = ready(ours, **how)
    figures = []
    for number in range(steps):
        packed = [pack(examples(2 * (number % 4) + i, 20, 40), shape=SHAPE) for i in range(2)]
        hyper = HYPER | {"lr": 2e-3, "divisor": float(sum(b.response_tokens for b in packed))}
        staged = [loop.stage(b) for b in packed]
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            loop.step(staged, hyper, [7 + number] * 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        figures += loop.finished(wait=True)
    assert not any(f.skipped for f in figures)
    return [(f.loss, f.grad_norm) for f in figures], ours.arena.weights.clone(), loop


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("kind", "table"), SOME)
def test_captured_is_eager_bit_for_bit(kind, table, dropout, deterministic):
    base, base_dtype = base_of(kind, table)
    found = []
    for graph in (True, False):
        ours = quantised.placed(base, LORA, base_dtype, "cuda", torch.bfloat16)
        qkv = ours.decoder.blocks[0].mixer.qkv
        assert isinstance(qkv.frozen, Unpacked) and qkv.adapter_columns
        figures, weights, loop = trained(ours, 6, graph=graph, deterministic=True, dropout=dropout)
        assert loop.captures == (1 if graph else 0)
        found.append((figures, weights))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("kind", "table"), SOME)
def test_trains_as_the_dequantised_base_does(kind, table, recompute):
    """Captured and tuned, 100 steps: the values are the same, rounded once to bf16, so the losses are within its noise
    (and fp16's would be)."""
    base, base_dtype = base_of(kind, table)
    sides = [
        quantised.placed(base, LORA, base_dtype, "cuda", torch.bfloat16),
        quantised.placed(dequantised_of(base, base_dtype), LORA, "bf16", "cuda", torch.bfloat16),
    ]
    assert isinstance(sides[1].decoder.blocks[0].mixer.qkv.frozen, Dense)
    got, want = (trained(side, 100, graph=True, recompute=recompute)[0] for side in sides)
    assert [f[0] for f in got] == pytest.approx([f[0] for f in want], rel=5e-3)
    assert got[0][1] == pytest.approx(want[0][1], rel=2e-2)
    assert got[-1][0] < got[0][0]


@pytest.mark.parametrize("kind", EVERY)
def test_every_kind_gives_the_cpus_losses_in_fp32(kind):
    base, base_dtype = base_of(kind, kind if kind not in ("nf4", "BF16") else "Q8_0")
    ours = quantised.placed(base, LORA, base_dtype, "cuda")
    figures, _, _ = trained(ours, 4, graph=True)
    cpu = quantised.placed(dequantised_of(base, base_dtype), LORA, "fp32")
    step, want = Step(cpu.decoder, cpu.arena), []
    for number in range(4):
        packed = [pack(examples(2 * (number % 4) + i, 20, 40)) for i in range(2)]
        step.set_hyper(HYPER | {"lr": 2e-3, "divisor": float(sum(b.response_tokens for b in packed))})
        for batch in packed:
            step.micro_step(batch)
        want.append(float(step.update_step()[0]))
    assert [f[0] for f in figures] == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", EVERY)
def test_dequantised_on_the_device_to_the_bit(kind, dtype):
    """As by the CPU's reference, in the scratch with adapter columns beside it, and of a table in pieces and by row."""
    base, base_dtype = base_of(kind, kind if kind not in ("nf4", "BF16") else "Q8_0", layers=1)
    ours = quantised.placed(base, LORA, base_dtype, "cuda", dtype)
    want = dequantised_of(base, base_dtype)
    weight = ours.decoder.blocks[0].feed_forward.gate_up.frozen
    if isinstance(weight, Dense):
        return  # floats of the compute dtype
    weight.dense()
    names = [f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up")]
    values = torch.cat([want.tensors[name].values() for name in names]).to(dtype)
    assert torch.equal(weight.weight.cpu(), values)
    table = ours.decoder.head.frozen
    ids = torch.tensor([0, 258, 3, 3], device="cuda")
    head = want.tensors["lm_head.weight"].values().to(dtype)
    assert torch.equal(table.rows(ids).cpu(), head[ids.cpu()])
    if isinstance(table, Table):
        assert torch.equal(torch.cat([w.cpu() for _, w in table.parts()]), head)


def asked_for(when: str = "current") -> int:
    """Bytes on the device, without what the allocator gives too much of (up to 1 MiB a tensor); `peak`: the most since
    that was last forgotten."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4.13), ("Q4_K", 4.5), ("Q8_0", 8.5)])
def test_nothing_else_stays_on_the_device(kind, bits):
    """Of a base of 100 million values: the codes and scales, one scratch, tables and the arena. No copy in floats; and
    while they are loaded, beside them at most one tensor (in fp32, with scales in fp32)."""
    shape = quantised.spec(1024, layers=8, ffn=4096, head_width=256, vocab=4096)
    if kind == "nf4":
        base, base_dtype = random_base(shape, torch.device("cuda")), "nf4"
    else:
        base, base_dtype = quantised.gguf_base(kind, shape, kind), "keep"
    torch.cuda.synchronize()
    before = asked_for()
    torch.cuda.reset_peak_memory_stats()
    ours = quantised.placed(base, LORA, base_dtype, "cuda", torch.bfloat16)
    grown, most = asked_for() - before, asked_for("peak") - before
    one = max(*(a * b for a, b in shape.layers[0].projections.values()), shape.vocab * shape.width)
    assert most - grown <= 4 * one * (1 + 1 / 64), (most, grown, one)
    projections = len(shape.layers) * sum(a * b for a, b in shape.layers[0].projections.values())
    tables = 2 * shape.vocab * shape.width * (2.0 if kind == "nf4" else bits / 8)
    scratch = 2 * scratch_values(shape, LORA, kind != "nf4")
    planned = projections * bits / 8 + tables + scratch + ours.arena.nbytes
    assert grown == pytest.approx(planned, rel=0.02), (grown, planned)
    assert quantised.frozen_bytes(ours.decoder) == pytest.approx(projections * bits / 8 + tables, rel=0.01)


def test_the_default_base_trains_captured_in_its_own_blocks(tmp_path):
    """And as NF4, and in bf16: the file's blocks give what its dequantised values give."""
    pytest.importorskip("gguf", reason="the gguf package is not installed: no GGUF file is read here")
    try:
        base = default_base()
    except GraftuneError as error:
        pytest.skip(str(error))
    values = {
        "base": str(base), "data": str(write_data(tmp_path / "data.jsonl", rows=40)), "device": "cuda", "lr": 1e-3,
        "compute_dtype": "bf16", "dropout": 0.05, "epochs": 4, "tokens_per_step": 512, "samples": 0, "rank": 8,
    }  # fmt: skip
    found = {}
    for kind in ("keep", "nf4", "bf16"):
        out = str(tmp_path / kind)
        run = train(Config.of(values | {"base_dtype": kind, "out": out}), console=Console(quiet=True)).folder
        events = read_events(run / "metrics.jsonl")
        assert events[-1]["captures"] == 1
        found[kind] = [e["loss"] for e in evals(events)]
        assert min(found[kind]) < 0.95 * found[kind][0]
    assert found["keep"] == pytest.approx(found["bf16"], rel=0.02)
    assert found["nf4"] != pytest.approx(found["bf16"], rel=1e-3)
