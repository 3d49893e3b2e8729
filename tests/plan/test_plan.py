"""The plan: a step rehearsed on tensors without memory takes, to the byte, what the same step takes on real ones, and
grows and shrinks as it should. What is chosen by it: test_plan_choices.py."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.synthetic import dataset_of, random_base

from graftune.batch import Example
from graftune.data.encoded import Examples
from graftune.data.pack import Capacities
from graftune.errors import GraftuneError
from graftune.infer.cache import CACHE, CacheSize, Request
from graftune.kernels import attention
from graftune.kernels.rehearsal import WORKSPACES, Device
from graftune.losses import Anchored, preference
from graftune.losses.interface import WEIGHTED
from graftune.losses.kto import Kto
from graftune.losses.policy import Ppo
from graftune.model.frozen.formats import fp8 as fp8_format
from graftune.model.frozen.weight_format import Option
from graftune.model.spec import ModelSpec
from graftune.observe.console import Console
from graftune.observe.memory import parse_bytes
from graftune.plan import Bytes, Card, Setup, choose, job, rehearse
from graftune.plan.counting import block_bytes
from graftune.plan.rehearse import sampling_cache
from graftune.runtime import Runtime
from graftune.settings.config import Config
from graftune.settings.sections import LoraConfig
from graftune.training import prepare
from graftune.weights import placement
from graftune.weights.base import open_base
from graftune.weights.placement import Placement
from tests.losses.pairs import Dpo
from tests.support import specs
from tests.support.real_rehearsal import rehearse_real

QUIET = Console(quiet=True)
MIB = 1 << 20
DEVICE = Device("cuda", "a card", (9, 0), 132, 60 * MIB, here=False)
CARD = Card(DEVICE, 80 << 30, 80 << 30)


def spec(layers: int = 3, width: int = 64, **more: Any) -> ModelSpec:
    values = {
        "layers": layers, "width": width, "ffn": 96, "heads": 4, "kv_heads": 2, "tied": False,
        "head_width": width // 4, "vocab": 300, "norm_eps": 1e-5, "rope_theta": 1e4, "max_positions": 512,
    }  # fmt: skip
    return specs.made(**values | more)


def biased(**more: Any) -> ModelSpec:
    return specs.edited(spec(**more), qk_norm=True, bias=True)


def setup(device: str = "cpu", kind: str = "fp32", compute: torch.dtype = torch.float32, **more: Any) -> Setup:
    where = torch.device(device)
    shape, lora = more.pop("shape", Capacities(96, 4, 33, 40)), more.pop("lora", LoraConfig(rank=4))
    base = random_base(more.pop("spec", spec()), where)
    placed = Placement(kind, "for the test", embedding_on_host=more.pop("embedding_on_host", False))
    placed = placed.placed_at(more.pop("on_host", False), more.pop("ranks", 0))
    longest, new = base.spec.max_positions, more.pop("new_tokens", 0)
    more["asked"] = tuple(Request(n, min(n + new, longest)) for n in more.pop("asked", ()))
    chosen = {name: more.pop(name) for name in ("method", "clip_mode") if name in more}
    config = Config().replace(recompute=more.pop("recompute", "none"), **chosen)
    values = {"backend": "cudnn" if where.type == "cuda" else "cpu", "card": CARD} | more
    return Setup(base, lora, Runtime(where, compute, "for the test"), placed, shape, config, **values)


def gpu(**more: Any) -> Setup:
    wide = spec(width=256, ffn=1024, vocab=4000)
    return setup("cuda:0", more.pop("kind", "bf16"), torch.bfloat16, **{"spec": wide} | more)


def told(of: Callable[[int], Setup], layers: int) -> Bytes:
    """What a few layers tell of all."""
    return job.from_few_layers(of(layers))


DELTA = {"family": "qwen3_5", "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
PAIRED = [Example([1, 2], [False, True], group=0)] * 2
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
    "convolutions": setup(spec=spec(family="lfm2", convolutions=(0, 1))),
    "delta nets": setup(spec=spec(**DELTA), asked=(90, 20, 30), new_tokens=8, cache_capacity=100),
    "delta nets, selective": setup(
        spec=spec(**DELTA), recompute="selective", lora=LoraConfig(rank=4, train_norms=True)
    ),
    "delta nets, every weight": setup(spec=spec(**DELTA), method="full"),
    "qk norm, bias, tied": setup(spec=biased(tied=True)),
    "options of attention": setup(spec=specs.with_options(spec()), lora=LoraConfig(rank=4, train_norms=True)),
    "ppo, per answer, with KL": setup(loss=Ppo(kl=0.1, ratios="sequence"), layout=Ppo(ratios="sequence").fields_of(())),
    "kto": setup(loss=Kto(), layout=Kto().fields_of(()), ahead=Capacities(96, 5, 33, 80)),
    "pairs, the start kept": setup(loss=Dpo("start"), layout=Dpo().layout(PAIRED)),
    "fp8": setup(kind="fp8"),
    "one long document": setup(shape=Capacities(128, 1, 128, 128)),
    "anchored": setup(loss=Anchored(0.1), recompute="full"),
    "anchored, with weights": setup(loss=Anchored(0.1), layout=WEIGHTED, kind="bf16", compute=torch.bfloat16),
    "fetched from host memory": setup(on_host=True, recompute="full"),
    "fetched nf4": setup(on_host=True, kind="nf4", spec=spec(layers=5)),
    "embedding in host memory": setup(embedding_on_host=True, on_host=True),
    "kept, in parts on ranks": setup(ranks=3, kind="keep"),
    "samples of a round": setup(sampled=(Request(50, 90, 3), Request(20, 60, 3)), at_once=4, evaluates=False),
    "prompts answered": setup(asked=(90, 20, 30), new_tokens=8, cache_capacity=100, recompute="full"),
}


@pytest.mark.few(7)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("name", CASES)
def test_without_memory_is_with_memory_to_the_byte(name: str) -> None:
    planned, real = rehearse(CASES[name]), rehearse_real(CASES[name])
    assert planned.phases == real.phases and planned.after == real.after
    assert {"adapters", "gradients", "moments"} <= planned.phases["step"].keys()
    assert "saved activations" in planned.phases["step"] or CASES[name].config.train.method == "full"


@pytest.mark.few(1)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_answers_are_planned(device: str) -> None:
    """Before the first step, and on a GPU beside the graph's pool; many long prompts take turns."""
    of = setup if device == "cpu" else gpu
    without = rehearse(of(recompute="full"))
    few, many = (rehearse(of(recompute="full", asked=(88,) * n, new_tokens=8, cache_capacity=100)) for n in (1, 9))
    held = len(spec().layers) * 2 * 96 * (2 * 16 * 4 if device == "cpu" else 2 * 64 * 2)  # keys and values of 96 tokens
    before = without.phases["load"]
    assert few.phases == many.phases, "one after the other: the cache takes 96 tokens"
    assert sum(few.phases["answer"].values()) > sum(before.values()) + held
    together = rehearse(of(asked=(88,) * 9, new_tokens=8, cache_capacity=400))
    assert sum(together.phases["answer"].values()) > sum(few.phases["answer"].values()) + 2 * held
    assert few.eager >= without.eager
    if device == "cuda":
        assert rehearse(of(recompute="full", evaluates=False, asked=(88,), new_tokens=8)).eager > held
    mixed = rehearse(of(recompute="full", asked=(*(4,) * 12, 88), new_tokens=8, cache_capacity=150))
    more = mixed.phases["answer"][CACHE] - few.phases["answer"][CACHE]
    assert 0 < more < held, "short prompts beside a long one"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_samples_are_planned_beside_training(device: str) -> None:
    """The cache stays while a run trains, and on a GPU the memory of the graphs that draw."""
    of, sampled = setup if device == "cpu" else gpu, (Request(50, 90, 3), Request(20, 60, 3))
    without = rehearse(of(evaluates=False))
    for at_once in (2, 6):
        setting = of(evaluates=False, sampled=sampled, at_once=at_once)
        found, compute = rehearse(setting), setting.runtime.compute
        shape = sampling_cache(setting.base.spec, compute, sampled, at_once)
        held = shape.bytes(CacheSize.of(setting.base.spec, compute))
        assert shape.places == at_once and shape.holds(sampled) and not shape.holds([Request(50, 1000)])
        for phase in ("sample", "step"):
            assert held <= found.phases[phase][CACHE] <= held + 8192, phase  # the page tables are small
        more = {name: size - without.phases["step"].get(name, 0) for name, size in found.phases["step"].items()}
        assert {name for name, size in more.items() if size > 20_000} <= {CACHE, WORKSPACES}, more
        assert more.get(WORKSPACES, 0) <= 64 * MIB, "prompts are read on the streams of evaluations"
        if device == "cuda":
            assert found.captured > without.captured and found.eager > 0


def test_passes_of_a_reference_are_planned() -> None:
    """Stored ones have a phase of their own; the graph of KTO's sums ahead of a step lies in the pool of the step's."""
    loss, pairs = preference.Dpo(), dataset_of(PAIRED, kind=preference.PAIRS).examples
    held = Examples(pairs.store.with_reference("base", per_token=False))
    each, stored = (rehearse(gpu(loss=loss, layout=loss.layout(examples))) for examples in (pairs, held))
    assert "reference" not in each.phases and sum(stored.phases["reference"].values()) > sum(
        stored.phases["load"].values()
    )
    shapes = None, Capacities(96, 5, 33, 80), Capacities(4096, 9, 33, 1024)
    without, small, large = (rehearse(gpu(loss=Kto(), layout=Kto().fields_of(()), ahead=shape)) for shape in shapes)
    assert without.captured <= small.captured < large.captured
    assert not any(found.without_rule for found in (each, stored, small, large))


@pytest.mark.parametrize("of", [setup, gpu])
def test_an_evaluation_is_planned_in_its_own_shape(of: Any) -> None:
    """Validation data may be longer than what is trained on, and have more to predict."""
    small, large = Capacities(64, 2, 32, 32), Capacities(4096, 2, 4096, 2048)
    as_it_is, longer = (rehearse(of(shape=small, evaluated=e, recompute="full")) for e in (small, large))
    assert longer.eager > max(4 * MIB, 1.5 * as_it_is.eager)
    assert sum(longer.phases["evaluate"].values()) > sum(longer.phases["load"].values()) + 4 * MIB
    assert ("evaluate" in as_it_is.phases) == (of is gpu), "on a CPU a step takes more than the same evaluated"


def test_a_job_evaluates_in_the_shape_of_its_data(tiny_folder, tmp_path: Path) -> None:
    for name, words in (("short", 3), ("long", 12)):
        row = json.dumps({"prompt": "the cat", "response": "sat by the mat " * words})
        (tmp_path / f"{name}.jsonl").write_text((row + "\n") * 8)
    values = {"base": str(tiny_folder("llama")), "data": str(tmp_path / "short.jsonl"), "device": "cpu"}
    config = Config.of(values | {"eval_data": str(tmp_path / "long.jsonl"), "compute_dtype": "fp32"})
    job = prepare.job_of(config, QUIET)
    made = job.setup("full", 128, job.placement)
    assert made.evaluated is not None and made.evaluates
    assert made.evaluated.longest >= 2 * made.shape.longest and made.evaluated.max_rows > made.shape.max_rows


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_what_weights_are_unpacked_into_is_scratch(kind: str) -> None:
    """One for all of them, not a part of the base."""
    made = [rehearse(gpu(kind=kind, spec=spec(n, width=256, ffn=1024, vocab=4000))).phases["step"] for n in (2, 3)]
    bf16 = rehearse(gpu(spec=spec(2, width=256, ffn=1024, vocab=4000))).phases["step"]
    largest = 256 * 2048 * (2 if kind == "nf4" else 1)
    assert made[0]["scratch"] - bf16["scratch"] > 0.9 * largest, "of gate and up"
    assert abs(made[1]["scratch"] - made[0]["scratch"]) < 0.1 * largest, "and once"


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


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("make", "more"),
    [
        (setup, {}),
        (gpu, {}),
        (gpu, {"recompute": "offload"}),
        (gpu, {"kind": "nf4", "on_host": True}),
        (gpu, {"kind": "nf4", "ranks": 2}),
    ],
)
def test_a_few_layers_tell_of_all(make: Any, more: Any) -> None:
    def of(layers: int) -> Any:
        return make(spec=spec(layers=layers, width=256, ffn=1024, vocab=4000), **more)

    found, whole = told(of, 9), rehearse(of(9))
    assert abs(found.peak / whole.peak - 1) < 2e-3 and abs(found.pools - whole.pools) <= 1e-3 * whole.peak
    assert found.owners == pytest.approx(whole.owners, rel=0.02, abs=64 << 10)
    assert abs(found.host / max(1, whole.host) - 1) < 2e-2 or not whole.host


@pytest.mark.few(1)
@pytest.mark.parametrize(("make", "policy"), [(setup, "none"), (gpu, "full")])
def test_a_few_layers_of_two_kinds_tell_of_all(make: Any, policy: str) -> None:
    mixed = {"family": "lfm2", "convolutions": (0, 1, 3, 4, 6, 7, 9, 10), "head_width": 128}
    of = make(recompute=policy, spec=spec(layers=12, width=256, ffn=1024, vocab=4000, **mixed))
    found, whole = job.from_few_layers(of), rehearse(of)
    assert abs(found.peak / whole.peak - 1) < 5e-3 and abs(found.after / whole.after - 1) < 5e-3
    alike = rehearse(of.with_layers([0] * 12))  # as if all were convolutions
    loaded, if_alike, told_of = (each.phases["load"]["base"] for each in (whole, alike, found))
    assert abs(if_alike / loaded - 1) > 2e-2 and abs(told_of / loaded - 1) < 1e-3


def test_libraries_memory_is_part_of_it() -> None:
    shape, narrow = Capacities(8192, 8, 128, 1024), {"width": 256, "ffn": 64, "vocab": 300}
    grouped = rehearse(gpu(shape=shape, spec=spec(**narrow)))
    plain = rehearse(gpu(shape=shape, spec=spec(**narrow, kv_heads=4)))
    sums, rows = 8192 * 256 * 4, 8192 * 4 * 4  # of cuDNN's backward, which is where grouped heads peak
    streams = 2 * 32 * MIB  # cuBLAS for the evaluation's, cuBLASLt for all
    assert grouped.phases["capture"]["workspaces"] == streams + 3 * sums + rows
    assert abs(grouped.after - plain.after) < 2 * MIB, "between two calls cuDNN's memory serves others"
    assert rehearse(gpu()).phases["step"]["workspaces"] == streams + DEVICE.cache, "emptied while algorithms are timed"
    dropped = rehearse(gpu(lora=LoraConfig(rank=4, dropout=0.1)))
    more = dropped.after - rehearse(gpu()).after
    assert 32 * MIB <= more < 64 * MIB, "torch's products: for the one stream of the step and its capture"
    for backend in ("flash", "triton"):
        assert rehearse(gpu(backend=backend)).peak > 0


def test_a_layer_with_other_heads_has_a_backend_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN does not take the widest heads: the layers that it serves keep it."""
    used: dict[int, set[str]] = {}
    forward = attention.forward

    def noted(q: torch.Tensor, *more: Any) -> Any:
        used.setdefault(q.shape[2], set()).add(more[5])
        return forward(q, *more)

    monkeypatch.setattr(attention, "forward", noted)
    assert rehearse(gpu(spec=specs.edited(spec(width=256), (1,), head_width=256))).peak > 0
    assert used == {64: {"cudnn"}, 256: {"flash"}}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["nf4", "fp8"])
@pytest.mark.thorough
def test_a_fetched_base_is_planned(kind: str) -> None:
    """On the device there are the buffers of two blocks and of a table; the bytes lie in host memory, or a share of
    them on each rank."""
    deep = spec(layers=24, width=256, ffn=1024, vocab=1000)
    resident, host, ranks, both = (
        job.from_few_layers(gpu(kind=kind, spec=deep, **where))
        for where in ({}, {"on_host": True}, {"ranks": 4}, {"on_host": True, "ranks": 4})
    )
    base, buffers = resident.owners["base"], "buffers of fetched blocks"
    few = 0.15 * base  # the adapters' own fp8 codes, norms, rows of scales
    assert host.owners["base"] < few and host.owners[buffers] < 0.25 * base
    assert 0.8 * base < host.host < 1.1 * base + MIB and resident.host < MIB
    assert 0.22 * base < ranks.owners["base"] < 0.4 * base and ranks.owners[buffers] >= host.owners[buffers]
    assert both.owners["base"] < few and 0.2 * base < both.host < 0.3 * base + MIB
    peaks = [found.peak for found in (resident, ranks, host)]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.thorough
def test_codes_for_both_ways_where_a_card_has_much_memory(tiny_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is free where it trains; elsewhere never. And the plan has them, and no place to turn them in."""
    from graftune.kernels import fp8

    monkeypatch.setattr(fp8, "require", lambda device, compute: None)
    base = open_base(str(tiny_folder("llama")))
    config = Config.of(
        {"base": str(base.path), "device": "cuda", "compute_dtype": "bf16", "base_dtype": "fp8"}
        | {"tokens_per_step": 4096}
    )
    least = 16 * base.spec.parameters
    where = Runtime(torch.device("cuda:0"), torch.bfloat16, "for the test")
    for free, expected in ((least, True), (least - 1, False), (0, False)):
        placed = placement.choose_placement(base, "fp8", where, free)
        assert (placed.option == "both") is expected and ("codes kept" in placed.why) is expected
    assert prepare.job_of(config, QUIET, memory=8 << 30).placement.option == "both"
    assert not prepare.job_of(config, QUIET, memory=job.CONTEXT_BYTES + least - 1).placement.option
    monkeypatch.setattr(fp8_format, "SPARE", 1e9)  # given up where a step would otherwise not fit as it is asked for
    wide = spec(width=256, ffn=1024, vocab=4000)

    def asked(free: int) -> job.Job:
        card, shapes = Card(DEVICE, free, free), job.any_data(64)
        return job.Job(config, random_base(wide, where.device), where, 64, shapes, card)

    one, large = asked(8 << 30), asked(8 << 30)
    assert one.placement.with_less_memory is not None and one.placement.fixed.with_less_memory is None
    one.placement = one.placement.with_less_memory
    assert one.placement.with_less_memory is None
    (policy, capacity), *_ = choose.choices(large)
    needs = [each.plan(policy, capacity).needed for each in (one, large)]
    assert needs[0] < needs[1]
    for needed, both in zip(needs, (False, True), strict=True):
        tight = asked(needed)
        assert choose.best(tight).settings["recompute"] == policy and (tight.placement.option == "both") is both
        assert ("codes kept" in tight.placement.why) is both
    once = gpu(kind="fp8", spec=wide)
    twice = dataclasses.replace(once, placement=Placement("fp8", "for the test", (Option("both"),)))
    codes = sum(out * into for out, into in wide.layers[0].projections.values()) * len(wide.layers)
    first, second = (rehearse(each).phases["step"]["base"] for each in (once, twice))
    largest = 2 * 1024 * 256
    assert codes - largest < second - first + codes // 50 and second - first < 1.3 * codes


@pytest.mark.thorough
def test_the_goals_of_8b_in_nf4() -> None:
    """4 x 2048 tokens, half of them trained: at most 9.5 GiB with full recompute and 8.2 offloaded."""
    values = {
        "family": "llama", "layers": 32, "width": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_width": 128,
        "vocab": 128256, "norm_eps": 1e-5, "rope_theta": 5e5, "max_positions": 8192, "tied": False,
    }  # fmt: skip
    shape, lora = Capacities(8192, 4, 4096, 2048), LoraConfig(rank=16, alpha=32.0, targets=("all_linear",))

    def peak(policy: str) -> float:
        def of(layers: int) -> Setup:
            large = specs.made(**values | {"layers": layers})
            return gpu(kind="nf4", recompute=policy, shape=shape, lora=lora, spec=large)

        return told(of, 32).peak / (1 << 30)

    assert peak("full") <= 9.3 and peak("offload") <= 7.5


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
    with pytest.raises(GraftuneError, match="not an amount of memory"):
        parse_bytes(text)
