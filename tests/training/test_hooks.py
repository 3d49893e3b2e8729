"""Hooks of the trainer: when each is called, and what it is given."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graftune.api import train
from graftune.observe.console import Console
from graftune.settings.config import Config
from graftune.training import trainer
from graftune.training.checkpoints import Checkpoints
from graftune.training.evaluation import Evaluation
from graftune.training.hooks import Hook, RunState
from graftune.weights.checkpoint import Progress
from tests.training.test_loop import settings


def state_of(progress: Progress, total: int = 12, **asked: Any) -> Any:
    session = SimpleNamespace(config=Config.of(asked))
    return RunState(session, Path(), SimpleNamespace(leads=True, world=None), Any, total, (6, 6), progress)  # type: ignore[arg-type]


class Noting(Hook):
    """Writes down every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, state: RunState) -> None:
        self.calls.append("start")

    def step_sent(self, state: RunState, micro_batches: int) -> None:
        self.calls.append(("sent", state.progress.step))

    def step_done(self, state: RunState, figures: Any) -> None:
        self.calls.append(("done", figures.tag["step"]))

    def due(self, state: RunState) -> bool:
        return state.progress.step == 2 and "run" not in self.calls

    def run(self, state: RunState) -> None:
        self.calls.append("run")

    def evaluated(self, state: RunState, result: Any) -> None:
        assert math.isfinite(result.loss)
        self.calls.append(("evaluated", state.progress.step))

    def stop(self, state: RunState) -> None:
        self.calls.append("stop")

    def finish(self, state: RunState) -> dict[str, Any]:
        self.calls.append("finish")
        return {"noted": len(self.calls)}

    def close(self, state: RunState) -> None:
        self.calls.append("close")


def test_a_hook_is_called_at_each_point_of_a_run(tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noting, real = Noting(), trainer.Trainer._hooks
    monkeypatch.setattr(trainer.Trainer, "_hooks", lambda self: [*real(self), noting])
    config = settings(tiny_folder("llama-shallow"), tmp_path / "run", max_steps=3, eval_every=0, samples=0)
    result = train(config, console=Console(quiet=True))
    steps = [("sent", 1), ("done", 1), ("sent", 2), ("done", 2), "run", ("sent", 3), ("done", 3)]
    ends = [("evaluated", 3), "stop", "finish", "close"]
    assert noting.calls == ["start", ("evaluated", 0), *steps, *ends]
    assert result.summary["noted"] == len(noting.calls) - 1


def test_when_evaluations_are_due() -> None:
    hook = Evaluation([])
    due = [
        step
        for step in range(13)
        if hook.due(state_of(Progress(step, step // 7, step - 6 * (step // 7)), eval_every=4))
    ]
    assert due == [0, 4, 6, 8, 12]
    assert not hook.due(state_of(Progress(4, 0, 4, last_eval=4), eval_every=4)), "once a step"


def test_when_checkpoints_are_due() -> None:
    hook = Checkpoints(Path(), {})
    places = [Progress(step, step // 7, step - 6 * (step // 7)) for step in range(13)]
    assert [p.step for p in places if hook.due(state_of(p, save_every=5))] == [5, 6, 10], "the end saves by itself"
    hook.tried = 6
    assert not hook.due(state_of(places[6])), "saved after its evaluation"
    hook.saved_at -= 16
    assert hook.due(state_of(places[3])) and not hook.due(state_of(places[0])), "by the clock"
