"""Planned against torch's allocator, each combination in a process of its own; and what auto chooses runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import plan
from graftune.cli import main
from graftune.observe.events import read_events
from graftune.train.plan import job
from tests.train.runs import write_data

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", plan.DEFAULT)
def test_within_three_percent(name: str) -> None:
    found = plan.apart(name)
    assert "error" not in found, found["error"]
    print(plan.table([found]).splitlines()[-1], json.dumps(found["owners"]))
    assert found["captures"] == 1 and found["grad_norm"] >= 0
    assert abs(found["off"]) <= plan.WITHIN, found
    assert plan.holds(found), "what a run is refused by holds what it takes"


def test_a_run_says_what_was_planned_and_what_it_took(tiny_folder, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.jsonl")
    line = ["train", str(tiny_folder("llama")), str(data), "--device", "cuda", "--max-steps", "3", "--samples", "0"]
    assert main([*line, "--out", str(tmp_path / "run")]) == 0
    (memory,) = [e for e in read_events(tmp_path / "run" / "metrics.jsonl") if e["event"] == "memory"]
    assert memory["measured"] >= torch.cuda.memory_allocated() > 0
    document = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert document["device"] == "cuda" and document["settings"]["recompute"] == "none"


def test_refused_on_purpose_and_the_suggestion_runs(tiny_folder, tmp_path: Path, monkeypatch, capsys) -> None:
    data = write_data(tmp_path / "data.jsonl", rows=200)
    line = ["train", str(tiny_folder("llama")), str(data), "--device", "cuda", "--max-steps", "2", "--samples", "0"]
    line += ["--tokens-per-step", "2048", "--tokens-per-micro-batch", "2048", "--recompute", "none"]
    needed = json.loads(_planned([*line[1:-2], "--recompute", "full"], capsys))["needed"]
    monkeypatch.setattr(job, "free_bytes", lambda device: needed)
    assert main([*line, "--out", str(tmp_path / "refused")]) == 2
    said = capsys.readouterr().err
    assert "training needs" in said and "--recompute" in said and not (tmp_path / "refused").exists()
    policy = said.split("--recompute ")[1].split()[0]
    line[-1] = policy
    assert main([*line, "--out", str(tmp_path / "suggested")]) == 0


def _planned(line: list[str], capsys) -> str:
    skip = {"--max-steps", "--samples"}
    kept = [word for i, word in enumerate(line) if word not in skip and (i == 0 or line[i - 1] not in skip)]
    assert main(["plan", *kept, "--json"]) == 0
    return capsys.readouterr().out
