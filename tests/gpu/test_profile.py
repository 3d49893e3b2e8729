"""A captured step is profiled as it is captured: the same bits, spans in order, nearly all of the time owned, and no
event in a graph without a profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.cases import parse
from benchmarks.step import profile as profiled_case

from graftune.cli import main
from graftune.observe.profile import Profile
from graftune.spans import DeviceClock, StampTurn
from graftune.training.profiler import Recorder
from tests.gpu.test_step import examples, ready, run
from tests.support import moe
from tests.training.runs import write_data

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def stepped(folder: Path, timed: bool, turns: int = 1, **more: Any) -> tuple[torch.Tensor, Profile]:
    """Ten steps of two micro-batches, of which a profile times those starting at step 5."""
    ours, _, loop = ready(folder, compute=torch.bfloat16, **more)
    recorder = Recorder(DeviceClock(CUDA))
    for number in range(10):
        batches = [examples(2 * number, 20, 33 + number), examples(2 * number + 1, 60)]
        if not timed or number < 4:
            run(loop, batches)
            continue
        with recorder.step(StampTurn(number % turns, turns)):
            run(loop, batches)
    loop.finished(wait=True)
    return ours.arena.weights.clone(), recorder.profile


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_profiled_run_trains_the_same_weights(tiny_folder, recompute: str, deterministic: None) -> None:
    plain, none = stepped(tiny_folder("llama"), timed=False, recompute=recompute)
    weights, found = stepped(tiny_folder("llama"), timed=True, turns=2, recompute=recompute)
    assert torch.equal(plain, weights) and not none.samples
    assert len(found.samples) == 4, "six profiled steps, of which the first of each turn captures"
    for sample in found.samples:
        for span in [*sample.spans, *sample.apart]:
            assert 0 <= span.start <= sample.total and 0 <= span.ms <= sample.total, span
        inside = [span.start for span in sample.spans if span.times == 2]
        assert inside and inside == sorted(inside), "the spans of a micro-step are in its order"
    document = found.document()
    named = {(row["phase"], row["name"]) for row in document["operations"]}
    assert {("forward", "qkv"), ("loss", "head"), ("backward", "attention"), ("update", "AdamW")} <= named
    assert any(phase == "recompute" for phase, _ in named) == (recompute != "none")
    assert bool(document["apart"]) == (recompute in ("none", "selective")), "weight gradients have streams of their own"
    for phase in document["phases"]:
        parts = sum(row["ms"] for row in document["operations"] if row["phase"] == phase["name"])
        assert parts == pytest.approx(phase["ms"])


def test_a_run_that_is_not_profiled_has_no_timing_event_in_its_graphs(
    tiny_folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    event = torch.cuda.Event

    def noted(*args: Any, **given: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            made.append(bool(given.get("external")))
        return event(*args, **given)

    monkeypatch.setattr(torch.cuda, "Event", noted)
    stepped(tiny_folder("llama"), timed=False)
    assert not any(made)
    stepped(tiny_folder("llama"), timed=True)
    assert any(made), "the check itself sees them"


@pytest.mark.parametrize("name", ["1b-l4-4x512", "1b-l4-nf4-4x512"])
def test_nearly_all_of_a_step_is_owned(name: str) -> None:
    """What profiling adds is for benchmarks/step.py to say, which runs alone on its GPU: at most 5%."""
    figures = profiled_case(parse(name), CUDA, steps=10, sustain=0.2)
    assert figures["owned"] >= 0.95, figures
    assert figures["eager_ms"] > figures["plain_ms"] and figures["phases"]["backward"] > figures["phases"]["loss"] > 0


def test_the_floor_of_a_mixture_has_the_rows_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAFTUNE_CACHE", str(tmp_path / "cache"))
    folder, data = moe.make_folder("qwen3_moe-wide", tmp_path / "base"), write_data(tmp_path / "data.jsonl")
    words = "--device cuda --compute-dtype bf16 --recompute none --tokens-per-step 256 --max-seq-len 64 --steps 2"
    assert main(["profile", str(folder), str(data), *words.split()]) == 0
    said = capsys.readouterr()
    assert "experts as in a step of the run" in said.out + said.err
