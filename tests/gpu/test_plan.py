"""Planned against torch's allocator, each combination in a process of its own; and what does not fit is refused on a
card that is really full, and what is suggested then runs there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.cases import Shape
from benchmarks.peers import write_folder

from benchmarks import plan
from graftune.api import train
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.settings.config import Config
from tests.gpu import full_card
from tests.training.runs import write_data

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", plan.DEFAULT)
def test_within_three_percent(name: str) -> None:
    found = plan.apart(name)
    assert "error" not in found, found["error"]
    print(plan.line(found), json.dumps(found["owners"]))
    assert found["captures"] == 1 and found["grad_norm"] > 0 and found["moved"]
    assert abs(found["off"]) <= plan.WITHIN, found
    assert plan.holds(found), "what a run is refused by holds what it takes"


def test_a_run_says_what_was_planned_and_what_it_took(tiny_folder, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.jsonl")
    values = {"base": str(tiny_folder("llama")), "data": str(data), "device": "cuda", "max_steps": 3, "samples": 0}
    train(Config.of(values | {"out": str(tmp_path / "run")}), console=Console(quiet=True))
    (memory,) = [e for e in read_events(tmp_path / "run" / "metrics.jsonl") if e["event"] == "memory"]
    assert memory["measured"] >= torch.cuda.memory_allocated() > 0
    document = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert document["device"] == "cuda" and document["settings"]["recompute"] == "none"


def test_refused_on_a_full_card_and_the_suggestion_runs(tmp_path: Path) -> None:
    """A small model in a micro-batch of 32768 tokens: two policies are a GiB apart. All else of the card is held here,
    so no other process may use it."""
    device = torch.device("cuda", 0)
    shape = Shape("small", 256, 1024, 8, 4, 2, 300, tied=True)
    write_folder(shape, tmp_path / "base", device)
    found = full_card.measure(tmp_path / "base", tmp_path, device, 32768)
    print(json.dumps(found))
    refused, ran = found["refused"], found["suggested"]
    assert refused["exit"] == 2 and "training needs" in refused["said"]
    assert refused["allocated"] == 0 and not refused["folder"], "nothing is loaded and nothing is left"
    assert ran["exit"] == 0 and 0 < ran["reserved"] <= ran["free"]
    assert found["suggestion"] == {"--recompute": "selective"}
    assert found["refused"]["taken"] < found["suggested"]["taken"]
