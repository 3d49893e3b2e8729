"""What a person sees of a run: when the base is asked, what counts as asking nothing, and that every phase is named."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from graftune.api import train
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.observe.report import document
from graftune.settings.config import Config
from graftune.training import reporter
from graftune.training import samples as samples_module
from graftune.training.samples import SCORED, scored_records
from tests.training.runs import adapter_bytes, write_data


def run_of(folder: Path, out: Path, **more: Any) -> list[str]:
    """The kinds of events of a short run, in order."""
    data = write_data(out.parent / "data.jsonl")
    values = {
        "base": str(folder), "data": str(data), "out": str(out), "device": "cpu", "compute_dtype": "fp32",
        "max_steps": 2, "tokens_per_step": 128, "samples": 2, "sample_tokens": 2,
    }  # fmt: skip
    train(Config.of(values | more), console=Console())
    return [e["event"] for e in read_events(out / "metrics.jsonl")]


def test_adapters_train_at_once_and_the_base_is_asked_at_the_end(
    tiny_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = run_of(tiny_folder("llama"), tmp_path / "run")
    assert events.count("sample") == 2 and "sample" not in events[: events.index("step")]
    said = capsys.readouterr()
    assert said.err.index("step 2/2") < said.err.index("asking the base") < said.err.index("asking the tuned model")
    assert "base:" in said.out and "tuned:" in said.out
    assert "validating: 0/3 examples" in said.err and "asking the base about unseen prompts: 0/2 answers" in said.err


def test_answers_on_the_way_change_nothing(tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the two that are shown are asked only for the score."""
    monkeypatch.setattr(samples_module, "is_sample_hash", lambda sha256: True)
    monkeypatch.setattr(samples_module, "score_all", lambda pairs: {"exact": 0})
    base, more = tiny_folder("llama"), {"max_steps": 3, "dropout": 0.1}
    run_of(base, tmp_path / "plain", **more)
    run_of(base, tmp_path / "asked", sample_every=1, **more)
    assert adapter_bytes(tmp_path / "asked") == adapter_bytes(tmp_path / "plain")
    events = read_events(tmp_path / "asked" / "metrics.jsonl")
    samples = [e for e in events if e["event"] == "sample"]
    assert [(e["step"], len(e["answers"]), e["shown"]) for e in samples] == [(0, 3, 2), (1, 2, 2), (2, 2, 2), (3, 3, 2)]
    assert len(document(tmp_path / "asked")["samples"]) == 2
    assert [e["phase"] for e in events if e["event"] == "phase"] == [
        "evaluating",
        "training",
        "evaluating",
        "finalising",
    ]
    last = read_events(tmp_path / "plain" / "metrics.jsonl")
    assert samples[-1]["answers"] == [e for e in last if e["event"] == "sample"][-1]["answers"]


def test_full_training_asks_its_base_before_it_is_gone(tiny_folder, tmp_path: Path) -> None:
    events = run_of(tiny_folder("llama"), tmp_path / "run", method="full")
    assert events.count("sample") == 2 and events.index("sample") < events.index("step")


@pytest.mark.usefixtures("draws")
def test_a_run_that_was_stopped_has_its_picture(tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = reporter.Reporter.step

    def stopping(self: reporter.Reporter, *figures: Any, **more: Any) -> None:
        step(self, *figures, **more)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(reporter.Reporter, "step", stopping)
    events = run_of(tiny_folder("llama"), tmp_path / "run", samples=0, max_steps=3)
    assert events[-1] == "run_end" and events.count("step") == 1
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert '"stopped":"interrupted"' in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("settings", "scored"),
    [
        ({}, SCORED),
        ({"samples": 0}, 0),
        ({"samples": 0, "score_records": 8}, 8),
        ({"score_records": 8}, 8),
        ({"score": False}, 0),
        ({"score": False, "score_records": 8}, 0),
    ],
)
def test_no_samples_means_that_nothing_is_asked(settings: dict[str, Any], scored: int) -> None:
    assert scored_records(Config.of(settings).run) == scored


def test_every_phase_before_the_first_step_is_named(
    tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine each of them can take more than five seconds."""
    named: list[str] = []
    working = Console.working
    monkeypatch.setattr(Console, "working", lambda self, label: named.append(label) or working(self, label))
    run_of(tiny_folder("llama"), tmp_path / "run", samples=0)
    assert named[:-1] == [
        "opening the base", "reading the data", "planning memory", "loading the base", "preparing the first step",
    ]  # fmt: skip
    assert named[-1] == "writing the adapter"
