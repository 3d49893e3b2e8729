"""The loading benchmark runs, measures what it says and adds up; its goals are for a quiet machine, and one that is
missed is its exit code."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import load
from graftune.model import huge_pages


def test_a_small_run() -> None:
    found = load.measure(gib=0.12, repeats=1)
    assert found["bytes"] > 200 << 20
    assert found["read_gb_s"] > 0 and found["fresh_gb_s"] > 0 and found["load_gb_s"] > 0 and found["mapped_s"] > 0
    assert abs(found["share"] - found["load_gb_s"] / found["read_gb_s"]) < 0.2
    assert found["met"] == (found["share"] > load.SHARE and found["mapped_s"] < load.MAPPED_S)
    assert [goal["is"] for goal in found["goals"]] == [found["share"], found["mapped_s"]]


@pytest.mark.parametrize("met", [True, False])
def test_a_missed_goal_is_an_exit_code_and_the_record_is_written_all_the_same(met, tmp_path, monkeypatch) -> None:
    rates = {"read_gb_s": 4.0, "fresh_gb_s": 3.0, "load_gb_s": 2.0, "share": 0.5, "mapped_s": 0.1}
    monkeypatch.setattr(load, "measure", lambda gib, repeats: {"bytes": 1 << 30, "met": met} | rates)
    monkeypatch.setattr(sys, "argv", ["load.py", "--json", str(tmp_path / "load.json")])
    assert load.main() == (0 if met else 1)
    assert json.loads((tmp_path / "load.json").read_text())["met"] == met


def test_advice_changes_no_value() -> None:
    for size in (0, 5, huge_pages.PAGE, 3 * huge_pages.PAGE + 17):
        tensor = torch.arange(size, dtype=torch.int64)
        assert huge_pages.advise(tensor) is tensor and torch.equal(tensor, torch.arange(size))
