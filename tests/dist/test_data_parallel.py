"""Two ranks compute what one does. The whole matrix, with four ranks and fifty steps, is in tests/soak."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from graftune.observe.events import read_events
from graftune.weights import checkpoint
from tests.dist import cases
from tests.dist.launcher import Launcher, apart, losses

STEPS = 12


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["lora, dropout, clipped by layer", "full, clipped as a whole", "lora, kto"])
def test_two_ranks_are_as_good_as_one(launcher: Launcher, base: Path, data: Path, case: str) -> None:
    more = [*cases.CASES[case], "--epochs", "9", "--max-steps", str(STEPS), "--eval-every", "5"]
    runs = {size: launcher.root / f"{case} {size}" for size in (0, 2)}
    for size, out in runs.items():
        cases.run(launcher, size, *cases.line(base, cases.suited(case, data), out, *more))
    cases.compare(runs[0], runs[2], STEPS)


def test_resumed_on_other_numbers_of_ranks(launcher: Launcher, base: Path, data: Path) -> None:
    """2 -> 1 -> 3 ranks, stopped by a callback's word each time, against one straight run on one."""
    more = [*cases.LORA, "--dropout", "0.2", "--epochs", "9", "--save-every", "3", "--keep-last", "9"]
    straight, run = launcher.root / "straight", launcher.root / "resumed"
    cases.run(launcher, 0, *cases.line(base, data, straight, *more, "--max-steps", str(STEPS)))
    cases.run(launcher, 2, *cases.line(base, data, run, *more, "--max-steps", str(STEPS)))
    for size, step in ((0, 3), (3, 6)):
        for number, path in checkpoint.steps(run / "checkpoints").items():
            if number > step:
                shutil.rmtree(path)
        shutil.rmtree(run / "adapter")
        cases.run(launcher, size, "train", "--resume", str(run))
    assert [e["step"] for e in read_events(run / "metrics.jsonl") if e["event"] == "resume"] == [3, 6]
    assert losses(run) == pytest.approx(losses(straight), rel=cases.LATER)
    assert apart(straight, run) <= cases.WEIGHTS
    stored = (run / "config.yaml").read_text() + (run / "checkpoints" / f"step-{STEPS}" / "state.json").read_text()
    assert "world" not in stored and "local_rank" not in stored
