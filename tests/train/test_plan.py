"""The plan: a step rehearsed on tensors without memory takes, to the byte, what the same step takes on real ones; it
grows and shrinks as it should; a run that does not fit is refused before it loads, and what is suggested then runs."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graftune.cli import main
from graftune.config import Config, LoraConfig
from graftune.data.pack import Capacities
from graftune.errors import GraftuneError
from graftune.kernels import nf4
from graftune.model.spec import ModelSpec
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.observe.memory import parse_bytes
from graftune.runtime import Runtime
from graftune.train import prepare
from graftune.train.plan import Bytes, Card, Setup, choose, job, rehearse, standins
from graftune.train.plan.ledger import Ledger, block_bytes
from graftune.train.plan.pretend import Pretend, Pretended
from graftune.weights import load
from graftune.weights.base import open_base
from graftune.weights.load import Placement
from graftune.weights.synthetic import random_base
from tests.train.runs import write_data

QUIET = Console(quiet=True)
MIB = 1 << 20
CARD = Card("a card", 80 << 30, 80 << 30)


def spec(layers: int = 3, width: int = 64, **more: Any) -> ModelSpec:
    values = {
        "family": "llama", "layers": layers, "width": width, "ffn": 96, "heads": 4, "kv_heads": 2, "tied": False,
        "head_width": width // 4, "vocab": 300, "norm_eps": 1e-5, "rope_theta": 1e4, "max_positions": 512,
    }  # fmt: skip
    return ModelSpec(**values | more)


def setup(device: str = "cpu", kind: str = "fp32", compute: torch.dtype = torch.float32, **more: Any) -> Setup:
    where = torch.device(device)
    shape, lora = more.pop("shape", Capacities(96, 4, 33, 40)), more.pop("lora", LoraConfig(rank=4))
    base = random_base(more.pop("spec", spec()), where)
    values = {"backend": "cudnn" if where.type == "cuda" else "cpu", "card": CARD} | more
    return Setup(base, lora, Runtime(where, compute, "for the test"), Placement(kind, "for the test"), shape, **values)


def gpu(**more: Any) -> Setup:
    wide = spec(width=256, ffn=1024, vocab=4000)
    return setup("cuda:0", more.pop("kind", "bf16"), torch.bfloat16, **{"spec": wide} | more)


def told(of: Callable[[int], Setup], layers: int) -> Bytes:
    """What a few layers tell of all."""
    few, more = job.FEW_LAYERS, job.MORE_LAYERS
    return rehearse(of(few)).extended(rehearse(of(more)), more - few, layers - few)


CASES = {
    "none": setup(),
    "selective": setup(recompute="selective"),
    "full": setup(recompute="full"),
    "bf16": setup(kind="bf16", compute=torch.bfloat16),
    "bf16 weights, fp32 products": setup(kind="bf16"),
    "fp16": setup(kind="fp16", compute=torch.float16, recompute="full"),
    "kept": setup(kind="keep"),
    "nf4": setup(kind="nf4"),
    "dropout": setup(lora=LoraConfig(rank=4, dropout=0.1)),
    "norms and layer clip": setup(lora=LoraConfig(rank=4, train_norms=True), clip_mode="layer"),
    "every weight": setup(method="full"),
    "qk norm, bias, tied": setup(spec=spec(qk_norm=True, qkv_bias=True, tied=True)),
    "fp8": setup(kind="fp8"),
    "fp8, calibrated": setup(kind="fp8", calibrates=True),
    "fp8, one code compared with two": setup(kind="fp8", calibrates=True, compares=True),
    "fp8, two codes": setup(kind="fp8", inputs=2),
    "one long document": setup(shape=Capacities(128, 1, 128, 128)),
}


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("name", CASES)
def test_without_memory_is_with_memory_to_the_byte(name: str) -> None:
    foretold, real = rehearse(CASES[name]), rehearse(CASES[name], real=True)
    assert foretold.phases == real.phases and foretold.after == real.after
    assert {"adapters", "gradients", "moments"} <= foretold.phases["step"].keys()
    assert "saved activations" in foretold.phases["step"] or CASES[name].method == "full"


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_what_weights_are_unpacked_into_is_scratch(kind: str) -> None:
    """One for all of them, not a part of the base."""
    made = [rehearse(gpu(kind=kind, spec=spec(n, width=256, ffn=1024, vocab=4000))).phases["step"] for n in (2, 3)]
    bf16 = rehearse(gpu(spec=spec(2, width=256, ffn=1024, vocab=4000))).phases["step"]
    largest = 256 * 2048 * (2 if kind == "nf4" else 1)
    assert made[0]["scratch"] - bf16["scratch"] > 0.9 * largest, "of gate and up"
    assert abs(made[1]["scratch"] - made[0]["scratch"]) < 0.1 * largest, "and once"


def test_tables_made_before_change_nothing() -> None:
    alone = rehearse(CASES["nf4"], real=True)
    nf4.quantise(torch.randn(64, 64))
    assert rehearse(CASES["nf4"], real=True).phases == alone.phases == rehearse(CASES["nf4"]).phases


def test_a_folder_and_a_gguf_are_planned_without_reading_their_weights(tiny_folder, smollm2, monkeypatch) -> None:
    from graftune.weights.gguf_io import GgufTensor
    from graftune.weights.safetensors_io import SafetensorsTensor

    for kind in (GgufTensor, SafetensorsTensor):
        for method in ("read", "gather", "values"):
            monkeypatch.setattr(kind, method, lambda *_: pytest.fail("a weight was read"))
    for path in (tiny_folder("qwen3"), smollm2):
        for device in ("cpu", "cuda"):
            config = Config.of({"base": str(path), "device": device, "compute_dtype": "fp32"})
            plan = prepare.job_of(config, QUIET, memory=8 << 30).plan("none", 256)
            assert plan.bytes.owners["base"] >= open_base(str(path)).spec.parameters * 4


@pytest.mark.parametrize("make", [setup, gpu])
def test_it_grows_with_tokens_rank_and_layers(make: Any) -> None:
    def peak(**more: Any) -> int:
        return rehearse(make(**more)).peak

    wide = spec() if make is setup else spec(width=256, ffn=1024, vocab=4000)
    deeper = spec(layers=5) if make is setup else spec(layers=5, width=256, ffn=1024, vocab=4000)
    tokens = [peak(shape=Capacities(n, n // 64, n // 2, 64), spec=wide) for n in (256, 512, 1024, 2048)]
    ranks = [peak(lora=LoraConfig(rank=r), spec=wide) for r in (4, 8, 64)]
    assert tokens == sorted(set(tokens)) and ranks == sorted(set(ranks))
    assert peak(spec=wide) < peak(spec=deeper)


def test_policies_save_in_their_order() -> None:
    shape = Capacities(2048, 8, 1024, 256)
    deep = spec(layers=6, width=256, ffn=1024, vocab=4000)
    on_gpu = [rehearse(gpu(shape=shape, spec=deep, recompute=p)) for p in ("none", "selective", "full", "offload")]
    on_cpu = [rehearse(setup(shape=shape, spec=deep, recompute=p)).peak for p in ("none", "selective", "full")]
    peaks = [found.peak for found in on_gpu]
    assert peaks == sorted(set(peaks), reverse=True) and on_cpu == sorted(set(on_cpu), reverse=True)
    assert on_gpu[3].host >= 6 * 2048 * 256 * 2, "offloaded inputs wait in host memory"
    assert rehearse(gpu(kind="nf4", spec=deep)).owners["base"] < 0.5 * rehearse(gpu(spec=deep)).owners["base"]


@pytest.mark.parametrize("make", [setup, gpu])
@pytest.mark.parametrize("policy", ["none", "full", "offload"])
def test_a_few_layers_tell_of_all(make: Any, policy: str) -> None:
    if make is setup and policy == "offload":
        pytest.skip("there is nowhere to offload to from a CPU")

    def of(layers: int) -> Any:
        return make(recompute=policy, spec=spec(layers=layers, width=256, ffn=1024, vocab=4000))

    found, whole = told(of, 12), rehearse(of(12))
    assert abs(found.peak / whole.peak - 1) < 1e-3 and abs(found.pools - whole.pools) <= 1e-3 * whole.peak
    assert found.owners == pytest.approx(whole.owners, rel=0.02, abs=64 << 10)


def test_libraries_memory_is_part_of_it() -> None:
    shape, narrow = Capacities(8192, 8, 128, 1024), {"width": 256, "ffn": 64, "vocab": 300}
    grouped = rehearse(gpu(shape=shape, spec=spec(**narrow)))
    plain = rehearse(gpu(shape=shape, spec=spec(**narrow, kv_heads=4)))
    sums, rows = 8192 * 256 * 4, 8192 * 4 * 4  # of cuDNN's backward, which is where grouped heads peak
    streams = 2 * 32 * MIB  # cuBLAS for the evaluation's, cuBLASLt for all
    assert grouped.phases["capture"]["workspaces"] == streams + 3 * sums + rows
    assert abs(grouped.after - plain.after) < 2 * MIB, "between two calls cuDNN's memory serves others"
    assert rehearse(gpu()).phases["step"]["workspaces"] == streams + CARD.cache, "emptied while algorithms are timed"
    dropped = rehearse(gpu(lora=LoraConfig(rank=4, dropout=0.1)))
    more = dropped.after - rehearse(gpu()).after
    assert 32 * MIB <= more < 64 * MIB, "torch's products: for the one stream of the step and its capture"
    for backend in ("flash", "triton"):
        assert rehearse(gpu(backend=backend)).peak > 0


def test_timing_attention_is_part_of_it_and_builds_the_plans_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from graftune.kernels.attention import cudnn_frontend

    built, plan = [], cudnn_frontend._plan
    monkeypatch.setattr(cudnn_frontend, "_plan", lambda device, shape: built.append(shape) or plan(device, shape))
    bare = spec(width=512, ffn=64, vocab=300, head_width=128, attention_scale=0.2)
    rehearse(gpu(spec=bare, evaluates=False))
    used = set(built)
    built.clear()
    timed = rehearse(gpu(spec=bare, evaluates=False, others=("triton",)))
    assert len(used) == 2 and set(built) == used and len(built) == 2 + 2 * 2 * bare.layers
    assert timed.peak >= rehearse(gpu(spec=bare, evaluates=False)).peak


@pytest.mark.parametrize("policy", ["none", "selective", "full", "offload"])
def test_fp8_is_planned(policy: str) -> None:
    found, wide = rehearse(gpu(kind="fp8", recompute=policy)), rehearse(gpu(recompute=policy))
    assert 0.4 < found.owners["base"] / wide.owners["base"] < 1.0
    assert found.phases["capture"]["workspaces"] == wide.phases["capture"]["workspaces"], "the same libraries"


def test_calibrating_is_planned() -> None:
    """What a block's weights read is summed up in matrices of their width, and the widest has two while it is factored:
    with a wide MLP and few tokens nothing takes more."""
    narrow = Capacities(512, 8, 64, 64)

    def of(layers: int = 3, ffn: int = 8192, **more: Any) -> Setup:
        return gpu(kind="fp8", spec=spec(layers=layers, width=256, ffn=ffn, vocab=300), shape=narrow, **more)

    found, without = rehearse(of(calibrates=True)), rehearse(of())
    assert "calibrate" not in without.phases and found.after == without.after
    sums = 4 * 8192**2
    taken = found.phases["calibrate"]["scratch"] - found.phases["load"].get("scratch", 0)
    # Ordered by rows and columns at once they would take six: torch writes both indices out on a GPU.
    assert 2 * sums < taken < 2.2 * sums and found.peak > without.peak + sums
    small = rehearse(of(ffn=512, calibrates=True, compares=True))
    assert small.peak == rehearse(of(ffn=512)).peak, "elsewhere it fits into what a step takes"
    whole = rehearse(of(12, calibrates=True))
    assert told(lambda layers: of(layers, calibrates=True), 12).peak == pytest.approx(whole.peak, rel=1e-3)


def test_codes_for_both_ways_where_a_card_has_much_memory(tiny_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is free where it trains; elsewhere never. And the plan has them, and no place to turn them in."""
    from graftune.kernels import fp8

    monkeypatch.setattr(fp8, "require", lambda device, compute: None)
    base = open_base(str(tiny_folder("llama")))
    config = Config.of({"base": str(base.path), "device": "cuda", "compute_dtype": "bf16", "base_dtype": "fp8"})
    least = 16 * base.spec.parameters
    where = Runtime(torch.device("cuda:0"), torch.bfloat16, "for the test")
    for free, expected in ((least, True), (least - 1, False), (0, False)):
        placed = load.choose_placement(base, "fp8", where, free)
        assert placed.both is expected and ("both ways" in placed.why) is expected
    assert prepare.job_of(config, QUIET, memory=8 << 30).placement.both
    assert not prepare.job_of(config, QUIET, memory=job.CONTEXT_BYTES + least - 1).placement.both
    monkeypatch.setattr(load, "BOTH_WAYS", 1e9)  # given up where a step would otherwise not fit as it is asked for
    wide = spec(width=256, ffn=1024, vocab=4000)

    def asked(free: int) -> job.Job:
        card, shapes = Card("a card", free, free), job.any_data(64)
        return job.Job(config, random_base(wide, where.device), where, 64, shapes, card)

    one, roomy = asked(8 << 30), asked(8 << 30)
    one.placement = one.placement.one_way
    (policy, capacity), *_ = choose.choices(roomy)
    needs = [each.plan(policy, capacity).needed for each in (one, roomy)]
    assert needs[0] < needs[1]
    for needed, both in zip(needs, (False, True), strict=True):
        tight = asked(needed)
        assert choose.best(tight).settings["recompute"] == policy and tight.placement.both is both
        assert ("both ways" in tight.placement.why) is both
    once = gpu(kind="fp8", spec=wide)
    twice = dataclasses.replace(once, placement=Placement("fp8", "for the test", both=True))
    codes = sum(out * into for out, into in wide.projections.values()) * wide.layers
    first, second = (rehearse(each).phases["step"]["base"] for each in (once, twice))
    largest = 2 * 1024 * 256
    assert codes - largest < second - first + codes // 50 and second - first < 1.3 * codes


def test_a_job_plans_it_where_the_run_does_it(tiny_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    from graftune.kernels import fp8

    monkeypatch.setattr(fp8, "require", lambda device, compute: None)
    for more, expected, inputs in (
        ({"base_dtype": "fp8"}, True, 2),
        ({"base_dtype": "fp8", "fp8_inputs": "one"}, True, 1),
        ({"base_dtype": "fp8", "calibrate": False}, False, 1),
        ({"base_dtype": "fp8", "calibrate": False, "fp8_inputs": "two"}, False, 2),
        ({}, False, 1),
    ):
        config = Config.of({"base": str(tiny_folder("llama")), "device": "cuda", "compute_dtype": "bf16"} | more)
        asked = prepare.job_of(config, QUIET, memory=8 << 30)
        made = asked.setup("none", asked.shapes(64), asked.placement)
        assert (made.calibrates, made.inputs) == (expected, inputs)


def test_the_goals_of_8b_in_nf4() -> None:
    """4 x 2048 tokens, half of them trained: at most 9.5 GiB with full recompute and 8.2 offloaded."""
    values = {
        "family": "llama", "layers": 32, "width": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_width": 128,
        "vocab": 128256, "norm_eps": 1e-5, "rope_theta": 5e5, "max_positions": 8192, "tied": False,
    }  # fmt: skip
    shape, lora = Capacities(8192, 4, 4096, 2048), LoraConfig(rank=16, alpha=32.0, targets=("all_linear",))

    def peak(policy: str) -> float:
        def of(layers: int) -> Setup:
            large = ModelSpec(**values | {"layers": layers})
            return gpu(kind="nf4", recompute=policy, shape=shape, lora=lora, spec=large)

        return told(of, 32).peak / (1 << 30)

    assert peak("full") <= 9.3 and peak("offload") <= 7.5


def test_nothing_is_left_of_the_pretence() -> None:
    kept = [torch.cuda.Stream, torch.cuda.Event, torch.cuda.current_stream, torch.tensor, nf4.reference.bins]
    had = "torch._dynamo" in sys.modules
    rehearse(gpu(kind="nf4"))
    rehearse(setup(kind="nf4"))
    assert kept == [torch.cuda.Stream, torch.cuda.Event, torch.cuda.current_stream, torch.tensor, nf4.reference.bins]
    assert ("torch._dynamo" in sys.modules) == had
    weight = torch.randn(70, 64)
    back = nf4.dequantise(nf4.quantise(weight), torch.float32)
    assert not isinstance(back, Pretended) and (back - weight).abs().max() < 0.6


def test_the_ledger_follows_views_writes_and_ends() -> None:
    ledger = Ledger()
    with Pretend(ledger), ledger.owner("mine"):
        a = torch.empty(100, 100)
        view, written = a[10:].t(), a.add_(1.0)
        holder = ledger.of("cpu")
        assert holder.live["mine"] == holder.total == 40_000 and written is a and view.device.type == "cpu"
        b = a.to(torch.bfloat16)
        ledger.give("yours", b)
        assert holder.live == {"mine": 40_000, "yours": 20_000}
        c = a @ a
        del a, written
        assert holder.total == 100_000, "the view still holds it"
        del view
    assert holder.total == 60_000 and holder.peak == 100_000 and holder.at_peak == {"mine": 80_000, "yours": 20_000}
    del b, c
    assert holder.total == 0


def test_blocks_of_the_allocator() -> None:
    assert [block_bytes(n) for n in (0, 1, 512, 513, 3 * MIB)] == [0, 512, 512, 1024, 3 * MIB]
    assert block_bytes(11 * MIB + 512 * 1024) == 12 * MIB, "a rest of up to one MiB stays with the block"
    assert block_bytes(10 * MIB + 512 * 1024) == 10 * MIB + 512 * 1024, "a larger one is split off"


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 << 30), ("80GB", 80 * 10**9), ("512 MiB", 512 << 20), ("1.5G", 1_500_000_000), ("7", 7)],
)
def test_amounts_of_memory(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "-3GiB", "0", "3XB"])
def test_no_amounts_of_memory(text: str) -> None:
    with pytest.raises(GraftuneError, match="no amount of memory"):
        parse_bytes(text)


# Choosing and refusing


def job_for(folder: Path, memory: int = 0, **more: Any) -> job.Job:
    values = {"base": str(folder), "device": "cuda", "max_seq_len": 64} | more
    return prepare.job_of(Config.of(values), QUIET, memory=memory)


def test_auto_takes_the_largest_micro_batch_and_then_the_least_recompute(tiny_folder) -> None:
    from graftune.train.plan import settle

    folder = tiny_folder("llama")
    roomy = settle(job_for(folder, 80 << 30, tokens_per_step=65536))
    assert (roomy.recompute, roomy.capacity) == ("none", 8192)
    assert settle(job_for(folder, 80 << 30)).capacity == 4096, "no more than a step has"

    def limit(policy: str, size: int) -> int:
        return job_for(folder, 80 << 30).plan(policy, size).needed + job.CONTEXT_BYTES

    for policy, size in (("none", 2048), ("selective", 4096), ("full", 2048), ("offload", 2048)):
        found = settle(job_for(folder, limit(policy, size)))
        assert found.fits and found.needed <= limit(policy, size)
        order = ("none", "selective", "full", "offload")
        assert order.index(found.recompute) <= order.index(policy)
    asked = settle(job_for(folder, limit("full", 4096), recompute="full"))
    assert (asked.recompute, asked.capacity) == ("full", 4096)
    fixed = settle(job_for(folder, limit("full", 4096), tokens_per_micro_batch=4096))
    assert fixed.capacity == 4096 and fixed.fits


def test_on_a_cpu_auto_is_1024_unless_memory_is_short(tiny_folder) -> None:
    from graftune.train.plan import settle

    folder = tiny_folder("llama")
    wide = settle(job_for(folder, 8 << 30, device="cpu"))
    assert (wide.recompute, wide.capacity) == ("none", 1024)
    short = job_for(folder, 8 << 30, device="cpu").plan("none", 512).needed
    assert settle(job_for(folder, short, device="cpu")).capacity == 512


def test_a_run_that_does_not_fit_is_refused_before_loading_and_the_suggestion_runs(
    tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = tiny_folder("llama"), write_data(tmp_path / "data.jsonl")
    line = [
        "train", str(folder), str(data), "--device", "cpu", "--compute-dtype", "fp32", "--rank", "4", "--samples", "0",
        "--tokens-per-step", "512", "--tokens-per-micro-batch", "512", "--recompute", "none", "--max-steps", "2",
        "--threads", "1", "--base-dtype", "fp32",
    ]  # fmt: skip
    config = Config.of({"base": str(folder), "data": str(data), "device": "cpu", "tokens_per_step": 512, "rank": 4})
    planned = prepare.job_of(config, QUIET, memory=1 << 40)
    free = planned.plan("full", 512, "fp32").needed
    assert free < planned.plan("selective", 512, "fp32").needed
    monkeypatch.setattr(job, "free_bytes", lambda device: free)

    with monkeypatch.context() as loading:
        loading.setattr(prepare, "open_engine", lambda *_, **__: pytest.fail("the model was loaded"))
        assert main([*line, "--out", str(tmp_path / "refused")]) == 2
    said = capsys.readouterr().err
    assert not (tmp_path / "refused").exists()
    sentence = said.splitlines()[-1]
    assert re.search(
        r"training needs [\d.]+ MiB of memory and [\d.]+ MiB are free; --recompute full would need", sentence
    )

    line[line.index("--recompute") + 1] = "full"
    assert main([*line, "--out", str(tmp_path / "suggested")]) == 0
    events = read_events(tmp_path / "suggested" / "metrics.jsonl")
    (memory,) = [event for event in events if event["event"] == "memory"]
    document = json.loads((tmp_path / "suggested" / "plan.json").read_text())
    assert memory["planned"] == document["expected"] and memory["measured"] > 0 and memory["step"] == 1
    assert document["settings"]["recompute"] == "full" and document["fits"]
    assert "memory: planned" in capsys.readouterr().err


def test_the_nearest_setting_may_be_a_smaller_micro_batch_or_fewer_bits(tiny_folder) -> None:
    folder = tiny_folder("llama-untied")
    asked = {"tokens_per_micro_batch": 4096, "recompute": "offload", "base_dtype": "bf16"}
    whole = job_for(folder, 80 << 30, **asked)
    from graftune.train.plan import best, nearest, refusal

    for size, kind in ((1024, "bf16"), (64, "nf4")):
        free = whole.plan("offload", size, kind).needed + job.CONTEXT_BYTES
        tight = job_for(folder, free, **asked)
        found = nearest(tight, best(tight))
        assert found is not None and found.fits and found.capacity >= size
        assert "--tokens-per-micro-batch" in str(refusal(tight, best(tight)))
    hopeless = job_for(folder, job.CONTEXT_BYTES + MIB, **asked)
    assert nearest(hopeless, best(hopeless)) is None
    assert "take a smaller model or a larger card" in str(refusal(hopeless, best(hopeless)))


def test_a_gguf_is_offered_its_own_blocks_before_others(smollm2: Path, tiny_folder, monkeypatch) -> None:
    from graftune.kernels.gguf_dequant import KINDS
    from graftune.train.plan import best, nearest, refusal

    asked = {"base_dtype": "fp32", "compute_dtype": "bf16", "recompute": "offload", "tokens_per_micro_batch": 64}
    whole = job_for(smollm2, 80 << 30, **asked)
    needed = {kind: whole.plan("offload", 64, kind).needed for kind in ("keep", "nf4", "fp32")}
    assert max(needed["keep"], needed["nf4"]) < needed["fp32"]
    enough = max(needed["keep"], needed["nf4"]) + job.CONTEXT_BYTES
    tight = job_for(smollm2, enough, **asked)
    found = nearest(tight, best(tight))
    assert found is not None and found.settings["base_dtype"] == "keep"
    assert "--base-dtype keep would need" in str(refusal(tight, best(tight)))
    first = next(t.dtype_name for t in tight.base.tensors.values() if len(t.shape) == 2)
    with monkeypatch.context() as unknown:  # blocks that no kernel of ours reads
        unknown.delitem(KINDS, first)
        found = nearest(tight, best(tight))
        assert found is None or found.settings["base_dtype"] == "nf4"
    folder = job_for(tiny_folder("llama-untied"), job.CONTEXT_BYTES + MIB, **asked)
    folder.free = folder.plan("offload", 64, "nf4").needed
    found = nearest(folder, best(folder))
    assert found is not None and found.settings["base_dtype"] == "nf4"


def test_what_the_host_lacks_is_refused_too(tiny_folder) -> None:
    from graftune.train.plan import best, largest, nearest, refusal

    asked = job_for(tiny_folder("llama"), 80 << 30, tokens_per_micro_batch=4096, recompute="offload")
    assert asked.host_free is None, "nobody knows the machine that has the card"
    plan = best(asked)
    asked.host_free = plan.bytes.host
    assert best(asked).fits and best(asked).document()["host_free"] == plan.bytes.host
    asked.host_free -= 1
    short = best(asked)
    assert short.fits_device and not short.fits and 0 < largest(asked, "offload") < 1 << 17
    found = nearest(asked, short)
    assert found is not None and (found.recompute, found.capacity) == ("full", 4096)
    said = str(refusal(asked, short))
    assert re.search(r"training needs [\d.]+ MiB of pinned host memory and [\d.]+ MiB are free; --recompute full", said)


def test_the_largest_micro_batch_is_the_largest(tiny_folder) -> None:
    from graftune.train.plan import largest

    asked = job_for(tiny_folder("llama"), 1000 << 20)
    sizes = {policy: largest(asked, policy) for policy in ("none", "full")}
    assert 0 < sizes["none"] < sizes["full"] < 1 << 17
    for policy, size in sizes.items():
        assert asked.plan(policy, size).fits and not asked.plan(policy, size + 512).fits, (policy, size)
    asked.longest = sizes["none"] + 512
    assert largest(asked, "none") == 0


def test_a_card_of_this_machine_has_its_memory_beside_it(tiny_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = job_for(tiny_folder("llama"), 8 << 30)
    monkeypatch.setattr(job, "available_bytes", lambda: 12345)
    here = Card("a card", 8 << 30, 8 << 30, here=True)
    with standins.asked(here):
        made = job.Job(absent.config, absent.base, absent.runtime, 64, absent.shapes, here)
    assert made.host_free == 12345


# The command


def test_plan_command_for_a_card_that_is_not_here(tiny_folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tiny_folder("llama"))
    assert main(["plan", folder, "--device", "cuda", "--memory", "24GiB", "--json", "--max-seq-len", "64"]) == 0
    document = json.loads(capsys.readouterr().out)
    owners = ("base", "adapters", "gradients", "moments", "saved activations", "workspaces", "CUDA context")
    assert all(document["owners"][name] > 0 for name in owners)
    assert document["fits"] and document["needed"] <= document["free"] < 24 << 30
    assert document["largest"]["none"] <= document["largest"]["full"] <= document["largest_looked_for"]
    assert main(["plan", folder, "--device", "cuda", "--memory", "24GiB", "--max-seq-len", "64"]) == 0
    shown = capsys.readouterr().out
    assert "131072 or more" in shown
    assert "saved activations" in shown and "largest micro-batch that fits" in shown and "█" in shown
    assert main(["plan", folder, "--device", "cuda", "--memory", "601MiB", "--max-seq-len", "64"]) == 2
    said = capsys.readouterr()
    assert "gradients" in said.out and "take a smaller model" in said.err
    if not torch.cuda.is_available():
        assert main(["plan", folder, "--device", "cuda"]) == 2
        assert "--memory 24GiB" in capsys.readouterr().err


def test_plan_without_triton_says_so(tiny_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.runtime", None)
    with pytest.raises(GraftuneError, match="the package triton is not installed"):
        job_for(tiny_folder("llama"), 24 << 30).plan("none", 64)


def test_cudnn_asks_for_what_the_formula_says() -> None:
    from graftune.kernels.attention.cudnn_frontend import Shape

    strides = (1, 1, 1, 1)
    plain = Shape(torch.bfloat16, 8, 8, 64, 4, 128, 256, 1.0, strides, strides)
    grouped = Shape(torch.bfloat16, 8, 2, 64, 4, 128, 256, 1.0, strides, strides)
    assert standins.workspace_bytes(plain) == 256 * 8 * (64 + 1) * 4
    assert standins.workspace_bytes(grouped) == 256 * 8 * (3 * 64 + 1) * 4


def trained(base: Path, folder: Path, kind: str, tokens: int) -> dict[str, Any]:
    """One step in a process of its own; the event that compares."""
    data = folder / "data.jsonl"
    words = "the cat sat on a mat and looked at some birds while rain fell over hills "
    rows = [{"prompt": words[:60], "response": words[: 20 + 10 * (i % 3)]} for i in range(14)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = [
        "train", str(base), str(data), "--device", "cpu", "--base-dtype", kind, "--max-steps", "1", "--samples", "0",
        "--no-score", "--tokens-per-step", str(tokens), "--val-split", "0.1", "--out", str(folder / "run"),
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "graftune", *line], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "memory: planned" in done.stderr
    (memory,) = [e for e in read_events(folder / "run" / "metrics.jsonl") if e["event"] == "memory"]
    return memory


@pytest.mark.parametrize(
    ("model", "kind", "tokens"),
    [("real", "fp32", 512), ("real", "keep", 256), ("tiny", "nf4", 512)],
)
def test_resident_memory_within_a_tenth(
    model: str, kind: str, tokens: int, smollm2: Path, tiny_folder, tmp_path: Path
) -> None:
    memory = trained(smollm2 if model == "real" else tiny_folder("llama"), tmp_path, kind, tokens)
    off = memory["planned"] / memory["measured"] - 1
    print(f"{model}, {kind}, {tokens} tokens: {memory['planned']} planned, {memory['measured']} measured, {off:+.1%}")
    assert abs(off) < 0.10, memory


MEDIUM = """
import json
import torch
from graftune.config import LoraConfig
from graftune.data.pack import Capacities
from graftune.model.spec import ModelSpec
from graftune.observe.memory import forget_peak, peak_resident_bytes, resident_bytes
from graftune.runtime import Runtime
from graftune.train.plan import Setup, rehearse, standins
from graftune.weights.load import Placement
from graftune.weights.synthetic import random_base

cpu = torch.device("cpu")
spec = ModelSpec(family="llama", layers=6, width=512, ffn=1536, heads=8, kv_heads=4, head_width=64, vocab=8000,
                 norm_eps=1e-5, rope_theta=1e4, max_positions=512, tied=False)
copies = standins.copies_operand(torch.float32)
setup = Setup(random_base(spec, cpu), LoraConfig(), Runtime(cpu, torch.float32, ""), Placement("fp32", ""),
              Capacities(512, 4, 256, 128), copies=copies)
planned = rehearse(setup).peak + resident_bytes()
forget_peak()
rehearse(setup, real=True)
print(json.dumps([planned, peak_resident_bytes()]))
"""


def test_resident_memory_of_a_model_of_medium_size() -> None:
    done = subprocess.run([sys.executable, "-c", MEDIUM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    planned, measured = json.loads(done.stdout)
    print(f"medium: {planned} planned, {measured} measured, {planned / measured - 1:+.1%}")
    assert abs(planned / measured - 1) < 0.10
