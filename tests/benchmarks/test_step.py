"""The step benchmark, as far as it runs without a GPU: cases, ratios, refusal, the record, and a peer for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.ours import ours

from benchmarks import bases, cases, crew, floor, measure, peers, plots, report, step
from graftune.kernels import attention, nf4
from graftune.model.frozen import MAPPED_ROWS_BYTES, Nf4Rows
from graftune.step.step import Step
from graftune.weights.synthetic import RandomRows

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def figures(ms: float, **more: float) -> dict[str, float]:
    proof = {"loss_first": 12.0, "loss_last": 11.9, "grad_norm": 1.0, "moved": 1.0}
    return {"ms": ms, "tok_s": 1e6 / ms, "host_ms": 0.3, "peak_gib": 42.0, "start_s": 5.0} | proof | more


def test_cases_parse():
    case = cases.parse("350m-full-4x512x4")
    assert (case.method, case.micro, case.tokens, case.responses) == ("full", 4, 8192, 1024)
    case = cases.parse("1.5b-nf4-qv-4x512")
    assert (case.base, case.targets, case.rank, case.alpha) == ("nf4", ("q_proj", "v_proj"), 16, 32.0)
    assert cases.parse("1b-r64-4x2048").alpha == 128 and cases.parse("8b-l2-4x2048").shape.layers == 2
    assert cases.parse("8b-q4_k-4x2048").base == "q4_k" and cases.parse("8b-fp8-4x2048").base == "fp8"
    for name in ("8b-auto-4x2048", "9b-1x1", "8b", "8b-4", "8b-4x2048-fp7", "350m-full-nf4-1x64", "8b-offload-4x2048"):
        with pytest.raises(ValueError, match="case"):
            cases.parse(name)


def test_full_before_the_size_trains_everything_and_behind_it_recomputes():
    assert [cases.parse(f"8b-nf4-4x2048{end}").recompute for end in ("", *(f"-{p}" for p in cases.POLICIES[1:]))] == [
        *cases.POLICIES
    ]
    both = cases.parse("350m-full-4x512-full")
    assert (both.method, both.recompute) == ("full", "full")
    assert cases.parse("8b-nf4-4x2048-full").method == "lora"


def test_every_named_case_is_one():
    named = [*cases.DEFAULT, *cases.GOALS]
    named += [name for axis in cases.SWEEPS for points in cases.sweep(axis).values() for _, name in points]
    assert all(cases.participants(cases.parse(name)) for name in named)
    for axis in cases.SWEEPS:
        for points in cases.sweep(axis).values():
            assert [x for x, _ in points] == sorted({x for x, _ in points})
    tokens = [cases.parse(n).tokens == x for points in cases.sweep("tokens").values() for x, n in points]
    assert all(tokens) and len({cases.parse(n).tokens for _, n in cases.sweep("documents")["1b, 8192 tokens"]}) == 1


def test_participants_are_those_of_the_method():
    lora, full = cases.parse("1b-1x512"), cases.parse("350m-full-4x512x4")
    assert cases.participants(lora) == ["floor", "ours", "peft", "liger", "unsloth"]
    assert cases.participants(full) == ["floor", "ours", "hf", "hf-compiled"]
    assert cases.participants(lora, ["hf", "liger-bf16", "floor"]) == ["floor", "liger-bf16"]
    assert cases.participants(cases.parse("8b-nf4-4x2048-full")) == ["ours", "peft", "liger", "unsloth"]
    assert cases.participants(cases.parse("8b-fp8-4x2048")) == ["floor", "ours"]
    assert cases.participants(cases.parse("70b-nf4-1x2048-full")) == ["ours"]
    assert "liger-bf16" in cases.participants(cases.parse("8b-4x2048"))


def test_sizes_are_the_shapes():
    billions = {name: shape.parameters / 1e9 for name, shape in cases.SHAPES.items()}
    assert billions["8b"] == pytest.approx(8.03, abs=0.01) and billions["1b"] == pytest.approx(1.24, abs=0.01)
    assert billions["70b"] == pytest.approx(70.55, abs=0.01)
    case = cases.parse("8b-4x2048")
    ids = cases.tokens(cases.parse("tiny-2x32"))
    assert torch.equal(ids, cases.tokens(cases.parse("tiny-2x32"))) and ids.shape == (cases.BATCHES, 1, 2, 32)
    masked = cases.labels(ids, cases.parse("tiny-2x32"))
    assert (masked[..., :16] == -100).all() and torch.equal(masked[..., 16:], ids[..., 16:])
    # Two products a weight and token, forward and input gradient, and attention's; the head on half of them.
    body = 4 * case.tokens * (case.shape.parameters - 2 * case.shape.vocab * case.shape.width)
    head = 4 * case.responses * case.shape.vocab * case.shape.width
    attention = 7 * case.rows * case.length**2 * case.shape.width * case.shape.layers
    assert floor.flops(case, floor.plan(case, own=False)) == body + head + attention


def test_own_floor_leaves_out_what_we_never_compute():
    case = cases.parse("tiny-2x32")
    everything, own = (floor.plan(case, own=flag) for flag in (False, True))
    assert [op for op in everything if op not in own and op.weight == "qkv"] == [floor.Op("input_grad", "qkv", 0, 64)]
    assert {op.rows for op in own if op.layer == 1 and op.weight in ("gate_up", "down")} == {case.responses}
    full = floor.plan(cases.parse("tiny-full-2x32"), own=True)
    assert floor.Op("input_grad", "qkv", 0, 64) in full and sum(op.kind == "weight_grad" for op in full) == 9


@pytest.mark.parametrize(
    "name",
    ["tiny-2x32", "tiny-full-2x32x2", "tiny-nf4-2x32", "tiny-fp8-2x32", "tiny-q8_0-2x32"],
)
def test_the_floor_runs(name):
    found = floor.measure_floor(cases.parse(name), CPU, steps=1)
    assert set(found) == {"floor", "floor_own"}
    assert found["floor"]["flops"] > found["floor_own"]["flops"] > 0 and found["floor"]["ms"] > 0
    assert set(floor.measure_floor(cases.parse(name), CPU, steps=1, own=False)) == {"floor"}


def test_a_packed_base_is_unpacked_before_every_product_of_a_pass():
    """Once forward and once back, and never for the head; the bytes are those of the codes and of bf16 values."""
    case = cases.parse("tiny-nf4-2x32")
    ops = floor.plan(case, own=False)
    for before, op in zip([None, *ops], ops, strict=False):
        if op.weight not in ("", "head") and op.kind != "unpack":
            assert before is not None and (before.kind, before.weight, before.layer) == ("unpack", op.weight, op.layer)
    assert sum(op.kind == "unpack" for op in ops) == 2 * 4 * case.shape.layers
    assert sum(op.kind == "unpack" for op in floor.plan(case, own=True)) == 2 * 4 * case.shape.layers - 1
    assert floor.flops(case, ops) == floor.flops(case, floor.plan(cases.parse("tiny-2x32"), own=False))
    large = cases.parse("8b-nf4-4x2048")
    projections = large.shape.parameters - 2 * large.shape.vocab * large.shape.width
    nf4_bytes = nf4.quantise(torch.randn(256 * 64, 64)).nbytes - 256 * 4 - 4  # the map and the offset are a tensor's
    assert nf4_bytes == pytest.approx(floor.NF4_BYTES * 256 * 64 * 64, rel=1e-9)
    moved = floor.unpacked_bytes(large, floor.plan(large, own=False))
    assert moved == pytest.approx(2 * projections * (2 + floor.NF4_BYTES))
    made = floor.Floor(case, CPU)
    made.scratch.fill_(float("nan"))
    made.run([floor.Op("unpack", "gate_up", 0)])
    assert made.scratch.isfinite().sum() == len(made.packed[0, "gate_up"]) < 192 * 64
    assert 4 * len(made.packed[0, "gate_up"]) == pytest.approx(192 * 64 * (2 + floor.NF4_BYTES), rel=1e-3)


def test_the_fp8_floor_multiplies_codes():
    case = cases.parse("tiny-fp8-2x32")
    made = floor.Floor(case, CPU)
    assert made.codes is not None and set(made.weights) == {(-1, "head")}
    for (layer, name), rows in made.codes.forward.items():
        assert rows.codes.dtype == torch.float8_e4m3fn and rows.codes.shape == floor.sizes(case.shape)[name]
        assert made.codes.back[layer, name].codes.shape == floor.sizes(case.shape)[name][::-1]
        assert len(rows.scale) == len(rows.codes)
    assert not any(op.kind == "unpack" for op in floor.plan(case, own=False))


@pytest.mark.parametrize(
    "name", ["tiny-nf4-2x32-full", "tiny-fp8-2x32", "tiny-q8_0-2x32-selective", "tiny-nf4-qv-2x32"]
)
def test_ours_trains_on_every_kind_of_base(name):
    case = cases.parse(name)
    found = measure.measure(ours(case, CPU), case.tokens, CPU, 1, time.time())
    assert found["ms"] > 0 and found["moved"] == 1.0 and found["grad_norm"] > 0
    assert f"base {case.base}" in found["note"] and f"recompute {case.recompute}" in found["note"]
    assert found["loss_first"] == pytest.approx(torch.tensor(300.0).log().item(), abs=0.3)


def test_the_note_names_the_attention_that_ran(monkeypatch):
    """It is timed inside the first step, where there are several."""
    case, real = cases.parse("tiny-1x32"), Step.micro_step

    def timed(self, batch):
        self.backend = "cpu"
        real(self, batch)
        self.backend = "mixed"

    monkeypatch.setattr(Step, "micro_step", timed)
    runner = ours(case, CPU)
    assert "attention cpu;" in runner.note
    assert "attention mixed; eager" in measure.measure(runner, case.tokens, CPU, 1, time.time())["note"]


def test_random_blocks_have_the_deviation_of_random_floats():
    for kind in cases.BLOCKS:
        found = bases.values(bases.codes(kind.upper(), 64, 512, CPU), kind.upper())
        assert found.isfinite().all() and float(found.std()) == pytest.approx(0.02, rel=0.1), kind
        assert abs(float(found.mean())) < 0.004, kind


def test_a_large_base_is_quantised_a_few_rows_at_a_time(monkeypatch):
    """No copy of a weight exists, in any dtype: 70B in bf16 would not fit beside its NF4."""
    case = cases.parse("70b-l1-nf4-1x2048-full")
    base = bases.base_of(case, CPU)
    read, real = [], RandomRows.read
    monkeypatch.setattr(RandomRows, "read", lambda s, a, b: read.append((b - a) * s.shape[1]) or real(s, a, b))
    source = base.tensors["layers.0.self_attn.k_proj.weight"]
    packed = Nf4Rows.quantised(source, CPU)
    assert source.nbytes == 0 and packed.shape == (1024, 8192)
    assert max(read) * 4 <= MAPPED_ROWS_BYTES and sum(read) >= 1024 * 8192
    assert packed.nbytes < 0.53 * 1024 * 8192


def test_the_floor_runs_our_attention():
    case = cases.parse("tiny-2x32")
    made = floor.Floor(case, CPU)
    made.attention = floor.Packed(case, CPU)
    for grad in made.attention.grads:
        grad.fill_(float("nan"))
    made.run(floor.plan(case, own=False))
    assert all(grad.isfinite().all() for grad in made.attention.grads)


@pytest.mark.parametrize(
    ("losses", "norms", "moved", "reason"),
    [
        ([1.0, 1.0], [0.0, 0.0], 1.0, "a gradient norm is 0"),
        ([1.0, 1.0], [1.0, float("nan")], 1.0, "not finite"),
        ([1.0, float("inf")], [1.0, 1.0], 1.0, "not finite"),
        ([1.0, 0.9], [1.0, 1.0], 0.0, "did not move"),
    ],
)
def test_no_gradient_no_speed(losses, norms, moved, reason):
    judged = measure.judged({"ms": 1.0, "tok_s": 1.0}, losses, norms, moved)
    assert reason in judged["refused"] and "ms" not in judged and "tok_s" not in judged
    assert report.line(judged).endswith("refused") and report.line(judged).startswith("no gradient:")
    json.dumps(judged, allow_nan=False)
    assert "ms" in measure.judged({"ms": 1.0}, [1.0, 0.9], [1.0, 1.0], 1.0)


def test_a_runner_that_trains_nothing_is_refused():
    weight = torch.ones(3)
    still = measure.Runner(lambda i: (torch.tensor(1.0), torch.tensor(0.0)), lambda: [weight])
    assert "refused" in measure.measure(still, 10, CPU, 2, time.time())

    def move(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight.add_(0.1)
        return torch.tensor(1.0), torch.tensor(0.5)

    found = measure.measure(measure.Runner(move, lambda: [weight]), 10, CPU, 2, time.time(), watch_syncs=True)
    assert found["moved"] == 1.0 and found["ms"] > 0 and found["grad_norm"] == 0.5
    assert found["syncs"] is None and found["start_s"] is not None, "nothing to wait for on a CPU"


def test_ratios_and_goals():
    found = {"floor": figures(394), "ours": figures(438), "unsloth": figures(502), "peft": {"error": "x"}}
    ratios = report.ratios(found)
    assert ratios["ours_over_floor"] == pytest.approx(1.112, abs=1e-3) and ratios["best_peer"] == "unsloth"
    assert ratios["best_peer_over_ours"] == ratios["unsloth_over_ours"] == pytest.approx(1.146, abs=1e-3)
    assert "peft_over_ours" not in ratios
    goals = {goal["what"]: goal["met"] for goal in report.goals("8b-4x2048", found)}
    assert goals == {
        "ours / floor": True,
        "unsloth / ours": True,
        "liger / ours": None,
        "peak GiB": True,
        "host ms per step": True,
    }
    slow = found | {"ours": figures(480, peak_gib=50.0)}
    assert not any(goal["met"] for goal in report.goals("8b-4x2048", slow) if goal["what"] != "host ms per step")
    assert report.ratios({"ours": {"refused": "no gradient"}, "peft": figures(3)}) == {"best_peer": "peft"}


def test_goals_between_cases_hold_within_a_run_only():
    def case(run: str, **participants: dict) -> dict:
        return {"tokens": 8192, "run": run, "participants": participants}

    result = {
        "cases": {
            "8b-4x2048": case("1", ours=figures(440), unsloth=figures(500)),
            "8b-nf4-4x2048": case("1", ours=figures(460)),
            "8b-fp8-4x2048": case("1", ours=figures(300), floor=figures(250)),
            "8b-nf4-4x2048-full": case("1", ours=figures(610, peak_gib=9.6)),
        }
    }
    report.close(result)
    said = {(g["where"], g["what"]): (g["is"], g["met"]) for g in report.every_goal(result)}
    assert said["8b-nf4-4x2048", "ours / 8b-4x2048"] == (pytest.approx(1.045, abs=1e-3), True)
    assert said["8b-fp8-4x2048", "unsloth, 8b-4x2048 / ours"] == (pytest.approx(1.667, abs=1e-3), False)
    assert said["8b-fp8-4x2048", "ours / floor"] == (1.2, True)
    assert said["8b-nf4-4x2048-full", "ms per step"] == (610, True)
    assert said["8b-nf4-4x2048-full", "peak GiB"] == (9.6, False)
    result["cases"]["8b-4x2048"]["run"] = "2"
    report.close(result)
    said = {(g["where"], g["what"]): g["met"] for g in report.every_goal(result)}
    assert said["8b-nf4-4x2048", "ours / 8b-4x2048"] is said["8b-fp8-4x2048", "unsloth, 8b-4x2048 / ours"] is None
    text = report.table(result)
    assert "at most 9.5: NOT reached" in text and "at most 620: reached" in text and "not measured" in text


def record(**participants: dict) -> dict:
    made = {"tokens": 8192, "participants": participants}
    report.close_case(made, "8b-4x2048")
    return made


def test_the_table_shows_failures_beside_figures():
    bad = {"unsloth": {"error": "ModuleNotFoundError: No module named 'unsloth' (exit 1)"}}
    text = report.table({"cases": {"8b-4x2048": record(floor=figures(394), ours=figures(438), **bad)}})
    assert "1.11" in text and "No module named 'unsloth'" in text and "at most 1.12: reached" in text


def test_a_merged_record_replaces_whole_cases(tmp_path):
    def case(run: str, **participants: dict) -> dict:
        return {"run": run, "participants": participants}

    old = {"gpu": "A", "cases": {"a": case("1", ours=figures(1)), "b": case("1", ours=figures(2))}, "sweeps": {"r": 1}}
    new = {"gpu": "A", "cases": {"b": case("2", peft=figures(3))}, "sweeps": {}}
    assert report.merged(old, new) == old | {"cases": old["cases"] | new["cases"]}
    silent = report.merged(old | {"torch": "2"}, new | {"torch": "", "triton": ""})
    assert (silent["torch"], silent["triton"]) == ("2", ""), "a call in which nobody came that far says nothing of it"
    old["swept"], new["swept"] = {"r": {"commit": "1"}, "s": {"commit": "1"}}, {"s": {"commit": "2"}}
    assert report.merged(old, new)["swept"] == {"r": {"commit": "1"}, "s": {"commit": "2"}}
    report.write(tmp_path / "deep" / "r.json", new)
    assert json.loads((tmp_path / "deep" / "r.json").read_text()) == new


def test_a_merged_case_of_the_same_run_gains_participants():
    def result(run: str, **participants: dict) -> dict:
        return {"peers": dict.fromkeys(participants, "1"), "cases": {"b": {"run": run, "participants": participants}}}

    old = result("1", ours=figures(2), peft={"error": "x"}, unsloth=figures(5))
    new = result("1", peft=figures(3), unsloth={"error": "y"}, liger={"error": "z"})
    both = report.merged(old, new)
    found = both["cases"]["b"]["participants"]
    assert {who: f.get("ms") for who, f in found.items()} == {"ours": 2, "peft": 3, "unsloth": 5, "liger": None}
    assert set(both["peers"]) == set(found) and "liger" not in old["cases"]["b"]["participants"]
    other = report.merged(old, result("2", peft=figures(3)))
    assert list(other["cases"]["b"]["participants"]) == ["peft"]
    for unnamed in ("", None):
        old["cases"]["b"]["run"] = unnamed
        assert list(report.merged(old, result(unnamed, peft=figures(3)))["cases"]["b"]["participants"]) == ["peft"]


def test_syncs_are_counted_each_time_and_the_mode_is_put_back(monkeypatch):
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits() -> None:
        warnings.warn("Synchronization debug mode does not yet detect all synchronizing operations", stacklevel=1)
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    assert measure.counted_syncs(waits) == 3 and modes == [0, "warn", 0]
    assert measure.counted_syncs(lambda: None) == 0
    with pytest.raises(ZeroDivisionError):
        measure.counted_syncs(lambda: print(1 / 0))
    assert modes[-1] == 0


def test_the_goals_of_the_host_and_of_the_best_peer():
    def goals(case: str, **participants: dict) -> dict:
        return {goal["what"]: (goal["is"], goal["met"]) for goal in report.goals(case, participants)}

    for syncs, met in ((0, True), (1, False), (None, None)):
        found = goals("8b-4x2048", ours=figures(438, syncs=syncs))
        assert found["host syncs in the steps"] == (syncs, met)
    everyone = {"liger": figures(210), "peft": figures(300)}
    found = goals("1b-4x2048", ours=figures(80), unsloth=figures(100), **everyone)
    assert found["best peer / ours"] == (1.25, False)
    assert goals("8b-1x512", ours=figures(30), unsloth=figures(240), **everyone)["best peer / ours"] == (7.0, True)
    assert goals("8b-1x512", ours=figures(30), **everyone)["best peer / ours"] == (None, None), "who is missing may win"
    assert goals("8b-4x2048", ours=figures(1120.4), floor=figures(1000))["ours / floor"] == (1.1204, False)
    assert goals("1.5b-nf4-qv-4x512", ours=figures(30))["best peer / ours"] == (None, None)


def test_a_crash_and_a_hang_are_reported(tmp_path):
    def run(code: str, limit: float) -> str | None:
        words = [sys.executable, "-c", code]
        job = crew.Job("job", lambda: words, tmp_path / "log", tmp_path, dict(os.environ), limit)
        assert list(crew.Crew(tmp_path).run([job])) == [job]
        return job.problem

    assert run("print('fine')", 60) == ""
    assert run("raise ValueError('no such kernel')", 60) == "ValueError: no such kernel (exit 1)"
    assert run("print('halfway', flush=True); import time; time.sleep(60)", 3).endswith("last line: halfway")


def test_the_folder_loads_in_transformers(tmp_path):
    import transformers

    for tied in (True, False):
        shape = cases.Shape("t", 64, 96, 2, 4, 2, 300, tied=tied)
        folder = tmp_path / str(tied)
        peers.write_folder(shape, folder, CPU)
        model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
        assert sum(p.numel() for n, p in model.named_parameters() if "norm" not in n) == shape.parameters
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer("w7 w9").input_ids == [7, 9] and tokenizer.pad_token == "<pad>"


def test_the_whole_benchmark_on_a_tiny_case(tmp_path):
    """PEFT's code really runs, both its cases in one process; the record has its fields."""
    out = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), "--device", "cpu", "--steps", "1"]
    command += ["--cases", "tiny-2x32:floor+peft,tiny-1x32:peft", "--json", str(out), "--commit", "abc"]
    command += ["--plot", str(tmp_path / "bars.png"), "--at-once", "2", "--logs", str(tmp_path / "logs")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    result = json.loads(out.read_text())
    assert done.returncode == 0, done.stderr
    assert set(report.FACTS) <= set(result) and result["commit"] == "abc" and result["torch"] == torch.__version__
    found = result["cases"]["tiny-2x32"]["participants"]
    assert list(found) == ["floor", "floor_own", "peft"]
    keys = {"ms", "tok_s", "peak_gib", "loss_first", "loss_last", "grad_norm", "moved", "host_ms", "start_s"}
    assert keys <= set(found["peft"]) and found["peft"]["moved"] == 1.0
    assert found["peft"]["loss_first"] == pytest.approx(torch.tensor(300.0).log().item(), abs=0.2)
    assert "ms" in result["cases"]["tiny-1x32"]["participants"]["peft"]
    assert [path.name for path in (tmp_path / "logs").glob("*peft*")] == ["tiny-2x32-peft.log"]
    assert result["peers"]["peft"] and (tmp_path / "bars.png").stat().st_size > 1000
    assert any("tiny-2x32" in text for text in done.stdout.splitlines()[-8:])


def test_sweeps_are_drawn(tmp_path):
    point = {"participants": {"floor": {"ms": 2.0}, "floor_own": {"ms": 1.9}, "ours": {"ms": 2.4}}}
    lost = {"participants": {"ours": {"error": "out of memory"}, "floor": {"ms": 9.0}}}
    curves = {"1b": [point | {"x": 512}, point | {"x": 1024}], "8b": [point | {"x": 512}, lost | {"x": 1024}]}
    made = plots.draw({"sweeps": dict.fromkeys(cases.SWEEPS, curves)}, tmp_path / "s.png")
    assert [path.name for path in made] == [f"s-{axis}.png" for axis in cases.SWEEPS]
    assert all(path.exists() for path in made)


def test_a_sweep_runs_and_a_point_that_fails_is_kept(tmp_path, monkeypatch):
    points = {"tiny": [(32, "tiny-1x32"), (64, "tiny-1x32x2"), (128, "tiny-1x32-offload")]}  # the last needs a GPU
    monkeypatch.setattr(cases, "sweep", lambda axis: points)
    monkeypatch.setattr(step, "SWEPT_S", 0.1)
    words = ["step.py", "--sweep", "tokens", "--device", "cpu", "--steps", "1", "--json", str(tmp_path / "r.json")]
    monkeypatch.setattr(sys, "argv", words)
    assert step.main() == 1
    found = json.loads((tmp_path / "r.json").read_text())["sweeps"]["tokens"]["tiny"]
    assert [point["x"] for point in found] == [32, 64, 128]
    assert all(set(point["participants"]) == {"ours", "floor"} for point in found), "one floor a point"
    assert all(point["participants"]["ours"]["sustained_s"] == 0.1 for point in found[:2])
    assert "error" in found[2]["participants"]["ours"] and "ms" in found[1]["participants"]["ours"]


def test_the_floor_tries_every_attention_that_a_step_may_take(monkeypatch):
    took = {"cudnn": 3.0, "mixed": 1.0, "triton": 2.0}

    class Sdpa:
        def __init__(self, *_):
            raise RuntimeError("not here")

    monkeypatch.setattr(attention, "choose", lambda *_: attention.Choice("cudnn", "", ("mixed", "triton")))
    monkeypatch.setattr(floor, "Packed", lambda case, device, backend: SimpleNamespace(name=backend))
    monkeypatch.setattr(floor, "Sdpa", Sdpa)
    monkeypatch.setattr(floor, "sustained", lambda work, *_, **__: took[work.args[0].name])
    assert floor.fastest(cases.parse("tiny-2x32"), torch.device("cuda")).name == "mixed"
