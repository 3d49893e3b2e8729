"""The setting `best`: a figure of the loss chooses the best step. Runs on pairs and ratings report their figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graftune.api import train
from graftune.errors import GraftuneError
from graftune.losses.preference import Dpo
from graftune.observe.console import Console
from graftune.observe.events import evals, read_events
from graftune.settings.config import Config
from graftune.step.evaluate import EvalResult
from graftune.training.evaluation import Evaluation
from graftune.training.metric import check_best
from graftune.weights.checkpoint import Progress
from tests.training.test_hooks import state_of
from tests.training.test_metric import settings


@pytest.mark.parametrize(("best", "better", "step"), [("margin", "higher", 2), ("margin", "lower", 4), ("loss", "", 3)])
def test_the_best_step_is_the_figures(best: str, better: Any, step: int) -> None:
    """By its direction, whatever the loss is; a figure that is not a number is no better."""
    state, hook = state_of(Progress(), loss="dpo", best=best), Evaluation(())
    state.parts.loss = Dpo()
    state.parts.loss.better = {"margin": better}  # type: ignore[misc]
    found = [(3.0, 0.0), (2.5, 0.3), (2.0, 0.5), (1.0, float("nan")), (1.5, 0.1)]
    for state.progress.step, (loss, margin) in enumerate(found):
        hook._count(state, EvalResult(loss, None, 1, 1, {"margin": margin}), None)
    assert state.progress.best_step == step and state.progress.stale == 4 - step
    assert hook.name == ("margin" if better else "")


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"best": "prefers"}, "best is 'prefers' and loss is cross_entropy; it must be one of: loss"),
        ({"best": "chosen", "loss": "dpo"}, "it must be one of: loss, margin, accuracy, prefers"),
        ({"best": "margin", "loss": "anchored"}, "it must be one of: loss, cross_entropy, drift"),
        ({"best": "margin", "loss": "kto", "metric": "exact"}, "each of them chooses the best checkpoint"),
    ],
)
def test_a_best_that_there_is_not_is_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(GraftuneError, match=why):
        check_best(Config.of(asked))
    check_best(Config.of({"best": "margin", "loss": "kto"}))


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_run_reports_the_figures_of_its_loss(
    loss: str, tiny_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"say {i}", "chosen": "z" * (1 + i % 5), "rejected": "a" * (1 + i % 3)} for i in range(24)]
    if loss == "kto":
        rows = [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2} for i, r in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {
        "loss": loss,
        "best": "margin",
        "lr": 0.003,
        "dropout": 0.0,
        "max_steps": 4,
        "eval_every": 2,
        "val_split": 0.5,
        "train_on": "last",
        "group": 3,
    }
    config = settings(tiny_folder("llama-shallow"), tmp_path / "run", **more | {"data": str(tmp_path / "rows.jsonl")})
    result = train(config, console=Console(quiet=True))
    warned = [text for text in capsys.readouterr().err.splitlines() if text.startswith("warning: ")]
    assert "warning: settings that only a run with rewards uses: group" in warned
    assert any("train_on does not apply to" in text for text in warned)
    events = read_events(tmp_path / "run" / "metrics.jsonl")
    first, *_, last = evals(events)
    assert first["margin"] == 0 and last["margin"] > 0 and last["metrics"]["margin"] == last["margin"]
    assert result.summary["metric"]["name"] == "margin" and result.summary["metric"]["best"] >= last["margin"]
    (step, *_) = [event for event in events if event["event"] == "step"]
    assert {"chosen", "rejected", "margin"} <= set(step) and ("kl" in step) == (loss == "kto")
