"""`graftune rl` on CUDA: stopped within a round and resumed = straight, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import graftune
from graftune.observe.events import read_events
from tests.training.runs import adapter_bytes

pytestmark = pytest.mark.gpu
REWARD = "def reward(completions, **columns):\n    return [sum(map(ord, one)) % 7 for one in completions]\n"


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_stopped_within_a_round_and_resumed_is_straight(compute, tiny_folder, tmp_path, deterministic):
    settings = settings_of(tiny_folder("llama"), tmp_path) | {"compute_dtype": compute}
    straight = graftune.train(**settings, out=str(tmp_path / "straight")).folder
    end = read_events(straight / "metrics.jsonl")[-1]
    assert end["event"] == "run_end" and end["captures"] == 1
    stop_at_3 = [lambda event: "stop" if (event["event"], event.get("step")) == ("step", 3) else None]
    stopped = graftune.train(**settings, out=str(tmp_path / "run"), callbacks=stop_at_3)
    assert (stopped.stopped, stopped.steps) == ("interrupted", 3)
    graftune.train(resume=tmp_path / "run")
    assert losses(tmp_path / "run") == losses(straight) and len(losses(straight)) == 6
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(straight)


def settings_of(base: Path, folder: Path) -> dict[str, Any]:
    """Three rounds of two updates; the long prompt is in one of them, so that the others alone would be smaller."""
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"word {number} " * (30 if number == 3 else 1)} for number in range(9)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "base": str(base), "data": str(folder / "prompts.jsonl"), "reward": (str(folder / "reward.py"),),
        "device": "cuda", "deterministic": True, "rank": 4, "lr": 0.02, "temperature": 20.0, "epochs": 1,
        "prompts_per_round": 3, "group": 4, "answer_tokens": 8, "updates_per_round": 2, "val_split": 0.0,
        "samples": 0, "schedule": "constant",
    }  # fmt: skip


def losses(run: Path) -> list[tuple[float, float]]:
    steps = [event for event in read_events(run / "metrics.jsonl") if event["event"] == "step"]
    return [(step["loss"], step["reward"]) for step in steps]
