"""`graftune rl`, killed with SIGKILL in a phase of a round and resumed, ends in the straight run's adapter and log."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from graftune.observe.events import latest, read_events
from tests.training.runs import Processes, adapter_bytes

# Two updates a round, two micro-batches an update, and evaluations at steps 0, 2 and 4.
SETTINGS = [
    *("--device", "cpu", "--threads", "1", "--rank", "4", "--lr", "0.02", "--temperature", "20", "--epochs", "1"),
    *("--prompts-per-round", "3", "--group", "3", "--answer-tokens", "4", "--updates-per-round", "2"),
    *("--tokens-per-micro-batch", "64", "--schedule", "constant", "--eval-every", "2", "--patience", "0"),
]
REWARD = "def reward(completions, **columns):\n    return [sum(map(ord, one)) % 7 for one in completions]\n"
TIMES = ("time", "tok_s", "tflops", "sample_tok_s", "sample_s", "reward_s", "train_s")


class Killed:
    """One straight run, and the means to repeat it with kills."""

    def __init__(self, root: Path, base: Path, processes: Processes):
        self.root, self.processes = root, processes
        (root / "reward.py").write_text(REWARD)
        (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"word {n}"}) + "\n" for n in range(7)))
        self.line = ["rl", str(base), str(root / "prompts.jsonl"), "--reward", str(root / "reward.py"), *SETTINGS]
        self.straight = root / "straight"
        assert self.run(*self.line, "--out", str(self.straight), here=True) == 0, self.said()

    def run(self, *line: str, die_at: tuple[str, int] | None = None, here: bool = False) -> int:
        return self.processes.run(*line, die_at=die_at, log=self.root / "log", here=here)

    def said(self) -> str:
        return (self.root / "log").read_text()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Any, processes: Processes) -> Killed:
    return Killed(tmp_path_factory.mktemp("rl-killed"), tiny_folder("llama-shallow"), processes)


def logged(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Everything that the log says about steps, except for times and memory, which other processes may change."""
    events = [e for e in read_events(run / "metrics.jsonl") if not str(e.get("text")).startswith("memory:")]
    assert events[-1]["event"] == "run_end"
    kinds = ("step", "eval", "answers", "sample", "warning")
    return {kind: [{k: v for k, v in e.items() if k not in TIMES} for e in latest(events, kind)] for kind in kinds}


# Steps between checkpoints (0: those of evaluations alone, between two rounds), and the kills of one run.
PLACES = {
    "sampling, at once again, and for an evaluation": (
        1,
        ("sampled token", 6),
        ("sampled token", 2),
        ("sampled token", 6),
    ),
    "while a reward function computes, then before its call": (0, ("waiting for a reward", 3), ("reward", 1)),
    "before a round is stored, then amid the log line of its answers": (1, ("round.json", 1), ("emit", 3)),
    "between micro-batches, then before the first update": (0, ("micro_step", 2), ("update_step", 1)),
    "between the updates of a round, then of the next": (1, ("update_step", 2), ("update_step", 3)),
    "between the updates, where no checkpoint is": (0, ("update_step", 2), ("update_step", 4)),
    "amid the first checkpoint, then before the next one's rename": (1, ("fsync", 4), ("rename", 2)),
    "amid the checkpoint within a round, then amid the next": (1, ("fsync", 14), ("fsync", 10)),
}


def test_the_straight_run_takes_every_path(killed: Killed) -> None:
    log = logged(killed.straight)
    assert [e["step"] for e in log["step"]] == [1, 2, 3, 4] and [e["step"] for e in log["answers"]] == [1, 3]
    assert [e["step"] for e in log["eval"]] == [0, 2, 4] and all(e["tokens"] > 64 for e in log["step"])


@pytest.mark.few(2)
@pytest.mark.parametrize("place", PLACES)
def test_killed_and_resumed_is_straight(killed: Killed, place: str, tmp_path: Path) -> None:
    save_every, first, *rest = PLACES[place]
    run, line = tmp_path / "run", [*killed.line, "--save-every", str(save_every)]
    assert killed.run(*line, "--out", str(run), die_at=first) == -signal.SIGKILL, killed.said()
    for die_at in rest:
        assert killed.run("rl", "--resume", str(run), die_at=die_at) == -signal.SIGKILL, killed.said()
    assert killed.run("rl", "--resume", str(run)) == 0, killed.said()
    assert adapter_bytes(run) == adapter_bytes(killed.straight)
    assert logged(run) == logged(killed.straight)


def test_a_checkpoint_within_an_earlier_round_has_its_answers(killed: Killed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = [*killed.line, "--save-every", "1", "--keep-last", "4", "--out", str(run)]
    assert killed.run(*line, die_at=("update_step", 4)) == -signal.SIGKILL, killed.said()
    for step in (2, 3):
        shutil.rmtree(run / "checkpoints" / f"step-{step}")
    assert (run / "checkpoints" / "step-1").is_dir()
    assert killed.run("rl", "--resume", str(run)) == 0, killed.said()
    assert adapter_bytes(run) == adapter_bytes(killed.straight) and logged(run) == logged(killed.straight)


def test_answers_that_are_gone_are_sampled_anew(killed: Killed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = [*killed.line, "--save-every", "1", "--out", str(run)]
    assert killed.run(*line, die_at=("update_step", 4)) == -signal.SIGKILL, killed.said()
    (run / "round.json").unlink()
    assert killed.run("rl", "--resume", str(run)) == 0, killed.said()
    assert "round.json does not hold the answers of step 4: they are sampled anew" in killed.said()
    assert [e["step"] for e in logged(run)["step"]] == [1, 2, 3, 4]
