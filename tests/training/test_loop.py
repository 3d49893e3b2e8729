"""The loop around the step: figures that come late, fixed shapes, fp16's scale on its way through checkpoints, and what
a run says of its own cost. What a kill does to a run is in tests/two_ways/test_resume.py."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from graftune import spans
from graftune.api import train
from graftune.cli import main
from graftune.model.arena import Arena
from graftune.observe.console import Console
from graftune.observe.events import evals, read_events, steps
from graftune.session import parts
from graftune.settings.config import Config
from graftune.step.pipeline import Figures, HostPipeline
from graftune.step.step import Step
from graftune.training import reporter
from graftune.weights import checkpoint
from graftune.weights.checkpoint import Progress
from tests.training.runs import adapter_bytes, write_data

QUIET = Console(quiet=True)


class LatePipeline(HostPipeline):
    """Gives figures two steps late, as a GPU does, and looks at what it is told of each step's batches."""

    def step(self, staged: Any, hyper: Any, ids: Any, tag: Any = None, between: Any = lambda: None) -> None:
        responses, tokens = sum(b.response_tokens for b in staged), sum(len(b.tokens) for b in staged)
        assert hyper["divisor"] == tag["response_tokens"] == responses and tag["tokens"] == tokens
        super().step(staged, hyper, ids, tag, between)

    def finished(self, wait: bool = False) -> list[Figures]:
        count = len(self.done) if wait else max(0, len(self.done) - 2)
        done, self.done = self.done[:count], self.done[count:]
        return done


def settings(folder: Path, out: Path, **more: Any) -> Config:
    out.parent.mkdir(parents=True, exist_ok=True)
    data = write_data(out.parent / "data.jsonl")
    values = {
        "base": str(folder), "data": str(data), "out": str(out), "device": "cpu", "compute_dtype": "fp32", "rank": 4,
        "dropout": 0.2, "lr": 0.02, "epochs": 3, "tokens_per_step": 128, "tokens_per_micro_batch": 64, "eval_every": 3,
        "save_every": 2, "keep_last": 99, "samples": 0, "schedule": "constant",
    }  # fmt: skip
    return Config.of(values | more)


def figures(run: Path) -> list[tuple[object, ...]]:
    names = ("step", "epoch", "loss", "grad_norm", "lr", "tokens", "response_tokens", "skipped")
    events = read_events(run / "metrics.jsonl")
    return [tuple(e.get(n) for n in names) for e in (*steps(events), *evals(events))]


def stopped_copy(run: Path, copy: Path, after: int = 4) -> Path:
    """A run as it was when step `after` had been saved, but for its log, which a resume takes back."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "adapter")
    for step, path in checkpoint.steps(copy / "checkpoints").items():
        if step > after:
            shutil.rmtree(path)
    return copy


def test_figures_that_come_late_change_nothing(tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = train(settings(tiny_folder("llama-shallow"), tmp_path / "at-once"), console=QUIET).folder
    monkeypatch.setattr(parts, "pipeline_for", lambda step, graph: LatePipeline(step))
    logged: list[tuple[int, list[int]]] = []
    save = checkpoint.save

    def watched(root: Path, arena: Arena, progress: Progress, *more: Any) -> Path:
        told = [e["step"] for e in read_events(root.parent / "metrics.jsonl") if e["event"] == "step"]
        logged.append((progress.step, told))
        return save(root, arena, progress, *more)

    monkeypatch.setattr(checkpoint, "save", watched)
    late = train(settings(tiny_folder("llama-shallow"), tmp_path / "late"), console=QUIET).folder
    assert figures(late) == figures(at_once) and adapter_bytes(late) == adapter_bytes(at_once)
    assert len(logged) > 4 and all(told == list(range(1, step + 1)) for step, told in logged)


@pytest.mark.parametrize("kind", [HostPipeline, LatePipeline])
def test_a_skipped_update_is_told_of_under_its_own_step(
    kind: type[HostPipeline],
    tiny_folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    update, calls = Step.update_step, []

    def overflowing(self: Step) -> torch.Tensor:
        if not self.arena.grads.is_meta:  # else it is only rehearsed, for the memory plan
            calls.append(1)
            if len(calls) in (2, 5):
                self.arena.grads[3] = math.inf
        return update(self)

    monkeypatch.setattr(Step, "update_step", overflowing)
    monkeypatch.setattr(parts, "pipeline_for", lambda step, graph: kind(step))
    run = train(settings(tiny_folder("llama-shallow"), tmp_path / "run", max_steps=6), console=Console()).folder
    events = read_events(run / "metrics.jsonl")
    assert [e["step"] for e in steps(events) if e["skipped"]] == [2, 5]
    assert [e["step"] for e in events if e["event"] == "warning"] == [2, 5]
    assert "step 5: the gradient was not finite" in capsys.readouterr().err
    saved = {step: json.loads((path / checkpoint.STATE).read_text())["progress"]["updates"]
             for step, path in checkpoint.steps(run / "checkpoints").items()}  # fmt: skip
    assert saved == {0: 0, 2: 1, 3: 2, 4: 3, 6: 4}


def test_recomputing_changes_nothing(tiny_folder, tmp_path: Path) -> None:
    kept = train(settings(tiny_folder("llama-shallow"), tmp_path / "kept"), console=QUIET).folder
    assert Config.load(kept / "config.yaml").train.recompute == "none"  # what auto came to
    for policy in ("selective", "full"):
        again = train(settings(tiny_folder("llama-shallow"), tmp_path / policy, recompute=policy), console=QUIET).folder
        assert figures(kept) == figures(again) and adapter_bytes(kept) == adapter_bytes(again)


def test_graph_and_recompute_may_change_on_a_resume(tiny_folder, tmp_path: Path) -> None:
    straight = train(settings(tiny_folder("llama-shallow"), tmp_path / "straight"), console=QUIET).folder
    run = stopped_copy(straight, tmp_path / "run")
    stored = Config.load(run / "config.yaml")
    train(stored, console=QUIET, resume=str(run), overrides={"graph": False, "recompute": "full"})
    assert figures(run) == figures(straight) and adapter_bytes(run) == adapter_bytes(straight)


def test_offload_wants_a_gpu(tiny_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_data(tmp_path / "data.jsonl")
    line = ["train", str(tiny_folder("llama-shallow")), str(data), "--device", "cpu", "--recompute", "offload"]
    assert main([*line, "--out", str(tmp_path / "run")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("graftune: recompute is offload, which needs a CUDA device") and last.count(";") == 1
    assert not (tmp_path / "run").exists()


def test_cuda_on_a_machine_without_it(
    tiny_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    data = write_data(tmp_path / "data.jsonl")
    line = ["train", str(tiny_folder("llama-shallow")), str(data), "--device", "cuda", "--out", str(tmp_path / "run")]
    capsys.readouterr()  # of who wrote the folder
    assert main(line) == 2
    said = capsys.readouterr()
    sentences = [line for line in said.err.splitlines() if line.startswith("graftune: ")]
    assert len(sentences) == 1 and said.err == sentences[0] + "\n" and said.out == "", "before data is read"
    assert "device cuda is not available here (" in sentences[0] and "; set device to " in sentences[0]
    assert not (tmp_path / "run").exists()


# fp16


def test_fp16_follows_fp32_from_the_first_update(tiny_folder, tmp_path: Path) -> None:
    losses = []
    for dtype in ("fp32", "fp16"):
        with pytest.warns(UserWarning) if dtype == "fp16" else nullcontext():
            config = settings(tiny_folder("llama-shallow"), tmp_path / dtype, compute_dtype=dtype, dropout=0.0)
            logged = steps(read_events(train(config, console=QUIET).folder / "metrics.jsonl"))
        assert not any(e["skipped"] for e in logged)
        losses.append([e["loss"] for e in logged[:4]])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_fp16_finds_its_scale_and_a_resume_keeps_it(tiny_folder, tmp_path: Path, monkeypatch) -> None:
    """Gradients overflow at first (in a unit too large for them), the scale comes down, updates begin."""
    monkeypatch.setattr("graftune.step.step.FP16_UNIT", 1.0)
    with pytest.warns(UserWarning, match="fp16 is for GPUs"):
        config = settings(tiny_folder("llama-shallow"), tmp_path / "straight", compute_dtype="fp16", lr=0.005)
        straight = train(config, console=QUIET).folder
        logged = steps(read_events(straight / "metrics.jsonl"))
        assert logged[0]["skipped"] and not logged[-1]["skipped"]
        assert any("loss scale halved" in str(e.get("text")) for e in read_events(straight / "metrics.jsonl"))
        run = stopped_copy(straight, tmp_path / "run")
        train(Config.load(run / "config.yaml"), console=QUIET, resume=str(run))
    assert figures(run) == figures(straight) and adapter_bytes(run) == adapter_bytes(straight)


# What a run says of itself


def test_the_end_tells_the_cost(tiny_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(settings(tiny_folder("llama-shallow"), tmp_path / "run"), console=Console()).folder
    said = capsys.readouterr().err
    assert "attention: cpu (" in said
    first, *_, end = read_events(run / "metrics.jsonl")
    assert first["attention"] == "cpu"
    assert end["captures"] == 0 and end["host_ms"] > 0 and "peak_device_memory" not in end
    assert end["attention"] == "cpu" and said.count("attention:") == 1


def test_what_a_first_batch_settles_is_told_when_it_happens(
    tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attention that was timed inside the first step, and a step that is captured once more."""

    class Captures(HostPipeline):
        sent = 0

        def step(self, *args: Any, **named: Any) -> None:
            self.work.backend = "cpu"
            super().step(*args, **named)
            self.work.backend, self.sent = "mixed", self.sent + 1
            self.captures = 1 + (self.sent >= 3)

    monkeypatch.setattr(parts, "pipeline_for", lambda step, graph: Captures(step))
    config = settings(tiny_folder("llama-shallow"), tmp_path / "run", max_steps=5, eval_every=1)
    events = read_events(train(config, console=Console()).folder / "metrics.jsonl")
    said = capsys.readouterr().err
    assert events[0]["attention"] == "cpu" and events[-1]["attention"] == "mixed"
    assert said.count("attention: mixed, timed") == 1 and said.count("captured again") == 1
    places = [said.index(words) for words in ("attention: mixed", "validation at step 1", "step 3: captured again")]
    assert sorted(places) == places < [said.index("validation at step 3")] * 3


@pytest.mark.thorough
def test_waits_are_marked_in_a_trace(tiny_folder, tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(
            settings(tiny_folder("llama-shallow"), tmp_path / "run", max_steps=2, samples=1, sample_tokens=2),
            console=QUIET,
        )
    names = {event.key for event in profile.key_averages() if event.key.startswith("graftune: ")}
    assert names == {
        f"graftune: {what}" for what in ("first step", "wait for steps", "evaluate", "checkpoint", "samples")
    }
    assert "record_function" not in type(spans.marked("evaluate")).__name__, "no marks without a profiler"


@pytest.mark.few(1)
@pytest.mark.parametrize("many", [9, 4])
def test_a_trace_of_some_steps(tiny_folder, tmp_path: Path, many: int, capsys) -> None:
    config = settings(tiny_folder("llama-shallow"), tmp_path / "run", max_steps=many, eval_every=2, trace_steps=3)
    folder = train(config, console=Console()).folder
    said, trace = capsys.readouterr().err, folder / "trace.json.gz"
    assert ("no trace: the run had no more than 4 steps" in said) == (many == 4) == (not trace.exists())
    assert (str(trace) in said) == (many == 9)
    if many == 9:
        names = {str(event.get("name")) for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
        assert {"graftune: evaluate", "graftune: checkpoint", "graftune: wait for steps"} <= names
        assert "graftune: first step" not in names


def test_a_run_that_outgrows_its_plan_says_so(tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for off, told in ((10.0, 0), (-0.9, 1)):
        monkeypatch.setattr(reporter, "OFF", {"cpu": off})
        run = train(
            settings(tiny_folder("llama-shallow"), tmp_path / str(told) / "run", max_steps=1), console=QUIET
        ).folder
        said = [e["text"] for e in read_events(run / "metrics.jsonl") if e["event"] == "warning"]
        assert len([text for text in said if "more than the" in text]) == told
