"""Rounds of reinforcement learning are timed as they run: ours, on a CPU, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import rounds


def test_rounds_are_timed_and_kept(tmp_path: Path) -> None:
    size = ["--prompts", "2", "--group", "4", "--prompt", "8", "--new", "8", "--rounds", "3"]
    assert rounds.main(["tiny", "--device", "cpu", "--who", "ours", *size, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["rounds"]["cases"]["tiny"]["ours"]
    assert 0 < found["sample_s"] < found["round_s"] and abs(found["ratio"] - 1) < 1e-3
