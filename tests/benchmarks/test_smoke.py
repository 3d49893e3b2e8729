"""Every benchmark runs with a tiny case on a CPU and writes a record; a time without a gradient is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.floor import flops, work_of

from benchmarks import cases, cpu, curves, data, kernels, measure, plan, random_bases, start, step
from graftune.model.families import from_config
from graftune.model.feed_forward.routing import LayerRouting
from graftune.step import floor
from tests.training.runs import write_data

CPU = torch.device("cpu")


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "gpu.json"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Participants of a step run in this process."""
    monkeypatch.setattr(step, "apart", step.work)


def options(record: Path) -> list[str]:
    return ["--device", "cpu", "--steps", "1", "--sustain", "0", "--json", str(record)]


def test_cases_are_what_they_say() -> None:
    case = cases.parse("8b-nf4-qv-r8-l2-4x2048x3-offload")
    assert (case.base, case.targets, case.rank, case.shape.layers) == ("nf4", ("q_proj", "v_proj"), 8, 2)
    assert (case.rows, case.length, case.micro, case.tokens, case.recompute) == (4, 2048, 3, 24576, "offload")
    assert cases.parse("8b-nf4-host-4x2048").config(torch.device("cpu")).base.base_on == "host"
    assert cases.parse("8b-shard-4x2048").where == "shard"
    assert cases.parse("350m-full-4x512").method == "full" and cases.parse("350m-4x512-full").recompute == "full"
    assert 8.0e9 < cases.SHAPES["8b"].parameters < 8.1e9
    for name in ("7b-1x8", "8b", "8b-odd-1x8", "8b-nf4-full-1x8", "8b-stored-1x8", "8b-full-dpo-1x8"):
        with pytest.raises(ValueError, match=name.split("-")[0]):
            cases.parse(name)
    every = {*step.DEFAULT, *plan.DEFAULT, *(n for a in cases.SWEEPS for c in cases.sweep(a).values() for _, n in c)}
    assert all(cases.parse(name).tokens for name in every)
    assert cases.participants(cases.parse("8b-fp8-4x2048"), ["unsloth", "ours", "floor"]) == ["floor", "ours"]


def test_pairs_share_a_prompt_and_their_answers_are_exchanged() -> None:
    case = cases.parse("tiny-dpo-drawn-8x1024")
    assert len(case.lengths) == 16 and len(set(case.lengths)) > 10 and max(case.lengths) <= 1024
    assert 250 < sorted(case.lengths)[8] < 500, "the median of the drawn lengths"
    batches = cases.documents(case)
    assert [len(one.tokens) for one in batches[0][0]] == list(case.lengths)
    assert sum(one.response_tokens for one in batches[0][0]) == case.responses
    for first, second, mirrored in zip(batches[0][0][::2], batches[0][0][1::2], batches[2][0][::2], strict=True):
        prompt = first.supervised.index(True)
        assert first.tokens[:prompt] == second.tokens[:prompt] and mirrored.tokens == second.tokens
        assert prompt == min(len(first.tokens), len(second.tokens)) // 2 and first.group == second.group
    assert cases.participants(cases.parse("8b-dpo-4x1024"), ["trl", "peft", "api", "ours"]) == ["ours", "trl"]


@pytest.mark.parametrize(
    "name",
    [
        "tiny-2x16",
        "tiny-dpo-stored-2x16",
        "tiny-dpo-drawn-2x80",
        "tiny-nf4-qv-2x16-full",
        "tiny-full-2x16x2",
        "tiny-q8_0-2x16-selective",
        "tiny-host-2x16",
    ],
)
def test_a_step_of_ours_beside_the_floor(name: str, record: Path, here: None) -> None:
    record.write_text(json.dumps({"steps": {"8b-4x2048": {"commit": "old"}}}))
    assert step.main([name, *options(record)]) == 0
    found = measure.read(record)["steps"]
    assert found["8b-4x2048"] == {"commit": "old"}, "the record's other cases stay"
    assert set(found[name]) >= {"commit", "date", "torch", "tokens", "participants"}
    ours = found[name]["participants"]["ours"]
    assert ours["ms"] > 0 and ours["grad_norm"] > 0 and ours["moved"] == 1 and "eager" in ours["note"]
    recomputed = cases.parse(name).recompute != "none"
    assert ("floor" in found[name]["participants"]) != recomputed


@pytest.mark.parametrize("how", ["", "drawn-"])
def test_steps_with_stored_references(how: str, record: Path, here: None) -> None:
    names = [f"tiny-dpo-{how}2x80", f"tiny-dpo-stored-{how}2x80"]
    assert step.main([names[0], f"{names[1]}=ours", "--who", "floor,ours", *options(record)]) == 0
    assert [set(measure.read(record)["steps"][name]["participants"]) for name in names] == [{"floor", "ours"}, {"ours"}]
    each, stored = (measure.read(record)["steps"][name]["participants"]["ours"] for name in names)
    assert each["loss_first"] == pytest.approx(math.log(2), abs=1e-4) == stored["loss_first"]


def test_a_loop_of_the_api_steps_as_ours_does(record: Path, here: None) -> None:
    assert step.main(["tiny-2x16", "--who", "ours,api", *options(record)]) == 0
    ours, api = (measure.read(record)["steps"]["tiny-2x16"]["participants"][who] for who in ("ours", "api"))
    assert ours["moved"] == api["moved"] == 1 and abs(ours["loss_first"] / api["loss_first"] - 1) < 0.05


def test_a_profile_of_a_case(record: Path, here: None) -> None:
    assert step.main(["tiny-2x16", "--who", "profile", *options(record)]) == 0
    found = measure.read(record)["steps"]["tiny-2x16"]["participants"]["profile"]
    assert found["owned"] > 0.95 and found["live_ms"] > 0 and found["phases"]["backward"] > 0


def test_ours_and_peft_take_the_same_steps_on_a_cpu(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3}
    monkeypatch.setattr(cpu, "SHAPE", cpu.SHAPE | small | {"num_key_value_heads": 1, "vocab_size": 512})
    cpu.main(["--random", "--rows", "2", "--length", "16", "--steps", "1", "--json", str(record)])
    found = measure.read(record)
    assert found["share_of_floor"] > 0 and found["ratio"] > 0
    for figure in ("last_loss", "last_grad_norm"):
        ours, peft = (found[figure][name] for name in (next(iter(found[figure])), "PEFT fp32"))
        assert ours == pytest.approx(peft, rel=1e-3 if found["note"] else 3e-2), figure


def test_participants_in_processes_of_their_own(record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that has a result for the floor, and an error for everything else."""
    python = tmp_path / "python"
    floor = """case "$4" in floor) echo '{"refused": "short"}' > "$6";; *) echo "XError: no block" >&2; esac"""
    python.write_text(f"#!/bin/sh\n{floor}\n")
    python.chmod(0o755)
    monkeypatch.setattr(step.sys, "executable", str(python))
    assert step.main(["tiny-2x16", "--who", "ours,floor", *options(record)]) == 1
    found = measure.read(record)["steps"]["tiny-2x16"]["participants"]
    assert found["ours"] == {"error": "XError: no block"} and found["floor"] == {"refused": "short"}


def test_a_sweep(record: Path, here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "sweep", lambda axis: {"tiny": [(16, "tiny-1x16"), (32, "tiny-1x32")]})
    assert step.main(["--sweep", "tokens", *options(record)]) == 0
    points = measure.read(record)["sweeps"]["tokens"]["curves"]["tiny"]
    assert [point["x"] for point in points] == [16, 32] and all(p["ours"] > 0 and p["floor"] > 0 for p in points)


def test_the_floor_counts_every_product_once() -> None:
    """Of a case without attention to speak of: 2 products of 2 operations a weight and token, the head's responses."""
    case = cases.parse("8b-1x2")
    shape = case.shape
    weights = shape.parameters - 2 * shape.vocab * shape.width
    wanted = 4 * weights * case.tokens + 4 * shape.vocab * shape.width * case.responses
    work = work_of(case)
    assert flops(work, floor.plan(work)) == pytest.approx(wanted, rel=1e-3)
    each = work_of(cases.parse("8b-dpo-1x2"))
    assert flops(each, floor.plan(each)) == pytest.approx(3 * wanted, rel=1e-3), "two rows, and one more forward pass"
    stored = work_of(cases.parse("8b-dpo-stored-1x2"))
    assert flops(stored, floor.plan(stored)) == pytest.approx(2 * wanted, rel=1e-3)
    packed = floor.plan(work_of(cases.parse("8b-nf4-1x2")))
    assert sum(op.kind == "unpack" for op in packed) == 2 * 4 * shape.layers, "once a pass and weight"


def test_the_delta_rule_is_in_the_floor() -> None:
    """Qwen3.5-9B's shape at 4x2048: its 24 delta nets take what is published for one, and it has the model's sizes."""
    case = cases.parse("9b-4x2048")
    work = work_of(case)
    assert work.delta_ms == pytest.approx(24 * 1.43) and work_of(cases.parse("9b-1x2048")).delta_ms == work.delta_ms / 4
    assert case.shape.parameters == pytest.approx(8.95e9, rel=0.01)
    assert len({layer.heads for layer in work.layers}) == 2 and work.layers[3].heads == floor.Heads(16, 4, 256)
    small = work_of(cases.parse("tinydelta-2x16"))
    ms, note = floor.measured(small, CPU, steps=1, sustain=0.0)
    assert ms > small.delta_ms > 0 and "added for the delta rule" in note


def test_the_floor_of_layers_with_heads_of_two_sizes() -> None:
    """Gemma-4-12B's shape: its parameters, and the products of keys that are values too."""
    case = cases.parse("12b-4x2048")
    work = work_of(case)
    assert case.shape.parameters == pytest.approx(11.9e9, rel=0.01)
    assert [work.layers[i].heads for i in (4, 5)] == [floor.Heads(16, 8, 256, 1024), floor.Heads(16, 1, 512)]
    sizes = [(17 * 512, 3840), (3840, 16 * 512), (2 * 15360, 3840), (3840, 15360)]
    assert [size[:2] for _, size in work.layers[5].products] == sizes
    small = work_of(cases.parse("tinywhole-2x16"))
    assert floor.measured(small, CPU, steps=1, sustain=0.0)[0] > 0


@pytest.mark.parametrize("name", ["tiny-fp8-2x16", "tiny-nf4-2x16", "tinymoe-2x16", "tinymoe-nf4-2x16"])
def test_floors_of_other_bases(name: str) -> None:
    work = work_of(cases.parse(name))
    floor.Floor(work, CPU).run(floor.plan(work))


def test_the_floor_has_the_rows_of_the_run() -> None:
    """In each layer as many rows of each expert as a step had; experts without rows are not unpacked."""
    work = work_of(cases.parse("tinymoe-nf4-2x16"))
    experts, rows = next((size.experts, size.rows(work.tokens)) for size in work.sizes if size.experts)
    tokens = [3, 1, *[0] * (experts - 2)]
    spec = from_config(cases.parse("tinymoe-nf4-2x16").shape.settings, "tiny")
    layers = floor.layers_of(spec, [LayerRouting(1, tokens, 0.5)])
    counted = floor.Floor(dataclasses.replace(work, layers=layers), CPU)
    counted.run(floor.plan(counted.work))
    assert "as in a step of the run" in counted.note and "at random" in floor.Floor(work, CPU).note
    for (layer, name), ends in counted.ends.items():
        assert (ends.tolist() == [3 * rows // 4, *[rows] * (experts - 1)]) == (layer == 1) and int(ends[-1]) == rows
        moved, all_of_it = len(counted.packed[layer, name]), len(counted.packed[0, name])
        assert moved == pytest.approx(all_of_it * (2 / experts if layer == 1 else 1), rel=0.01)


@pytest.mark.parametrize(
    ("losses", "norms", "moved", "reason"),
    [
        ([1.0, float("nan")], [1.0, 1.0], 1.0, "not finite"),
        ([1.0, 1.0], [1.0, 0.0], 1.0, "a gradient norm is 0"),
        ([1.0, 1.0], [1.0, 1.0], 0.0, "did not move"),
    ],
)
def test_without_a_gradient_there_is_no_time(losses, norms, moved, reason) -> None:
    found = measure.judged({"ms": 1.0}, losses, norms, moved)
    assert "ms" not in found and reason in found["refused"] and json.dumps(found)


def test_random_blocks_have_the_deviation_of_random_floats() -> None:
    for kind in cases.BLOCKS:
        made = random_bases.values(random_bases.codes(kind.upper(), 64, 2048, CPU), kind.upper())
        assert made.std() == pytest.approx(0.02, rel=0.1) and abs(made.mean()) < 0.004, kind


@pytest.mark.thorough
def test_the_plan_of_a_case_and_its_run() -> None:
    for name in ("tiny-r4-2x64-full", "tiny-dpo-2x64"):
        found = plan.one(name, CPU)
        assert found["moved"] and found["grad_norm"] > 0 and found["measured"] > 0 and "tiny" in plan.line(found)
    one = {"name": "a", "off": 0.01, "measured": 100 << 30, "needed": 100 << 30, "reserved": 101 << 30}
    within, furthest, held = plan.goals([one, {"name": "b", "error": "no"}])
    assert (within["is"], within["met"]) == (1, False) and furthest["met"] and held["met"]
    assert not plan.good(one | {"reserved": 103 << 30}) and not plan.good({"name": "b", "error": "no"})


@pytest.mark.parametrize("name", ["tiny-nf4-r4-2x64", "tiny-q8_0-r4-2x64-full", "tiny-full-2x64"])
def test_a_card_that_is_not_here_is_planned(name: str) -> None:
    case = cases.parse(name)
    found = plan.planned(case, plan.job_of(case, torch.device("cuda", 0), 80 << 30)).bytes
    assert sum(found.owners.values()) > 0 and found.phases["capture"]["saved activations"] > 0


@pytest.mark.thorough
def test_curves_beside_each_other(tiny_folder, tmp_path: Path, record: Path) -> None:
    rows = write_data(tmp_path / "data.jsonl", rows=40)
    words = [str(rows), "--base", str(tiny_folder("llama")), "--device", "cpu", "--steps", "3", "--json", str(record)]
    assert curves.main([*words, "--runs", "fp32,nf4"]) == 0
    found = measure.read(record)["curves"]
    assert len(found["fp32"]["losses"]) == 3 and found["nf4"]["beside"] == "fp32" and found["nf4"]["step_apart"] > 1e-4
    assert curves.main([*words, "--runs", "fp32", "--reference", str(record)]) == 0
    assert measure.read(record)["curves"]["fp32"]["to_reference"]["most_apart"] == 0


def test_kernels_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels.measure(CPU, ("nf4", "Q8_0"), [(64, 256)], (32, 256))["kinds"]
    assert [row["differing"] for row in found.values()] == [0, 0]
    exact = kernels.blocks_reference.dequantise
    monkeypatch.setattr(kernels.gguf_dequant, "dequantise", lambda raw, kind, out: (exact(raw, kind, out), out.neg_()))
    wrong = kernels.measure(CPU, ("Q8_0",), [(64, 256)], (32, 256))["kinds"]
    assert wrong["Q8_0"]["differing"] > 0 and kernels.goals(wrong)[0]["met"] is False


def test_data_is_encoded_and_found_again(tiny_folder, record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(what: str, path: str, base: str, cache: str) -> dict[str, object]:
        monkeypatch.setenv("GRAFTUNE_CACHE", cache)
        return data.worker(what, path, base)

    monkeypatch.setattr(data, "apart", here)
    words = ["--rows", "40", "--long", "0", "--base", str(tiny_folder("llama")), "--json", str(record)]
    assert data.main(words) == 0
    found = measure.read(record)["data"]["one-turn"]
    assert found["first"]["tokens"] == found["second"]["tokens"] > 0 and found["ratio"] > 0


def test_a_start_is_timed_phase_by_phase(tiny_folder, record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run, which otherwise has a process of its own, is in this one."""
    run = {"run": lambda words, **_: SimpleNamespace(returncode=start.main(words[2:]))}
    monkeypatch.setattr(start, "subprocess", SimpleNamespace(**run, DEVNULL=0, PIPE=0))
    words = ["--base", str(tiny_folder("llama")), "--rows", "30", "--max-steps", "1", "--device", "cpu"]
    assert start.main([*words, "--ways", "warm", "--json", str(record)]) == 0
    found = measure.read(record)["start"]["ways"]["warm"]
    assert {"import torch", "reading the data", "planning memory", "first step"} <= set(found["phases"])
    assert found["total"] == pytest.approx(sum(found["phases"].values()), abs=1) and found["steps"] == 1
    assert found["adapter"] < found["end"]
    assert found["end"] == pytest.approx(found["total"] - found["phases"]["import torch"], abs=1)
