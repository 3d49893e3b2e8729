"""A metric of the user's own: it chooses the best step and the early stop, and its faults are counted and reported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from graftune.api import train
from graftune.cli import main
from graftune.errors import GraftuneError
from graftune.observe.console import Console
from graftune.observe.events import evals, read_events
from graftune.session.text import Sample
from graftune.settings.config import Config
from graftune.training.evaluation import is_better
from graftune.training.metric import Metric, Question, check_metric
from graftune.weights.checkpoint import Progress
from tests.training.test_loop import settings

QUIET = Console(quiet=True)
SOURCE = """
import os, sys, time
from pathlib import Path

def as_told(answer, record):
    counter = Path(__file__).with_suffix(".count")
    count = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(count + 1))
    assert set(record) == {"prompt", "response"}
    values = [1, 2, 9, 3, 4, 5, 6, 7]
    return {"told": values[count % 8], "length": len(answer)}

def faults(prompt, answer, reference, record):
    print("printed by the metric", flush=True)
    match answer:
        case "raise": raise ValueError("this one\\nis wrong")
        case "text": return "good"
        case "nan": return float("nan")
        case "none": return None
        case "nested": return {"a": {"b": 1}}
        case "exit": sys.exit(3)
        case "die": os._exit(7)
        case "hang": time.sleep(60)
        case "other": return {"length": 3}
        case "stdin": return len(sys.stdin.read())
    return {"right": answer == reference, "length": len(answer)}

def always(answer):
    raise RuntimeError("never")

def strange(text, gold):
    return 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "measure.py"
    path.write_text(SOURCE)
    return path


def run(tiny_folder, out: Path, **more: Any) -> tuple[Any, list[dict[str, Any]]]:
    config = settings(tiny_folder("llama-shallow"), out, sample_tokens=2, dropout=0.0, **more)
    result = train(config, console=QUIET)
    return result, read_events(out / "metrics.jsonl")


@pytest.mark.parametrize(("goal", "best", "last"), [("max", 2, 4), ("min", 1, 3)])
def test_a_metric_chooses_the_best_step_and_the_early_stop(
    tiny_folder, tmp_path: Path, file: Path, goal: str, best: int, last: int
) -> None:
    more = {"metric": f"{file}:as_told", "metric_goal": goal, "metric_records": 1, "patience": 2, "eval_every": 1}
    result, events = run(tiny_folder, tmp_path / "run", **more)
    assert [e["metrics"]["told"] for e in evals(events)] == [1, 2, 9, 3, 4][: last + 1]
    assert (result.stopped, result.steps, result.summary["best_step"]) == ("early stop", last, best)
    assert result.summary["metric"] == {"name": "told", "start": 1, "best": {"max": 9, "min": 2}[goal]}
    assert [e["loss"] for e in evals(events) if e["step"] == best] == [result.best_eval], "the loss of the kept step"
    assert Config.of_run(tmp_path / "run").run.metric == f"{file.resolve()}:as_told"


def test_where_every_call_fails_the_loss_decides(tiny_folder, tmp_path: Path, file: Path) -> None:
    more = {"max_steps": 4, "eval_every": 1, "lr": 0.002}
    plain, _ = run(tiny_folder, tmp_path / "plain", **more)
    result, events = run(tiny_folder, tmp_path / "run", metric=f"{file}:always", metric_records=2, **more)
    assert result.summary["best_step"] == plain.summary["best_step"] and result.best_eval == plain.best_eval
    assert all((e["metrics"], e["metric_records"], e["metric_failed"]) == ({}, 2, 2) for e in evals(events))
    said = [e["text"] for e in events if e["event"] == "warning"]
    assert len(said) == 5 and "failed for 2 of 2 answers; there is no mean; first in row" in said[0]
    assert "RuntimeError: never (line 29 of measure.py)" in said[0] and "fewer failed calls counts as better" in said[0]


def test_a_mean_over_the_easy_answers_does_not_win(tiny_folder, tmp_path: Path, file: Path) -> None:
    """At step 2 the metric fails for one of two answers, and its mean over the other one is the largest."""
    with file.open("a") as source:
        source.write(
            "\ncalls = [0]\n\ndef picky():\n    calls[0] += 1\n"
            "    if calls[0] == 6:\n        raise ValueError('no number')\n"
            "    return 9 if calls[0] == 5 else 1 + calls[0] // 7\n"
        )
    more = {"metric": f"{file}:picky", "metric_records": 2, "max_steps": 3, "eval_every": 1, "metric_goal": "max"}
    result, events = run(tiny_folder, tmp_path / "run", **more)
    assert [(e["metrics"]["picky"], e.get("metric_failed", 0)) for e in evals(events)] == [
        (1, 0),
        (1, 0),
        (9, 1),
        (2, 0),
    ]
    assert result.summary["best_step"] == 3 and result.summary["metric"]["best"] == 2


def scores_of(metric: str, answers: list[str], seconds: float = 10.0) -> Any:
    config = Config.of({"metric": metric, "metric_seconds": seconds})
    asked = [Question("prompt", [1], "good", row) for row in range(1, len(answers) + 1)]
    made = Metric(config, asked, ())
    try:
        return made.scores([Sample(answer, [], None, "stop") for answer in answers])
    finally:
        made.close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("raise", "ValueError: this one is wrong (line 16 of measure.py)"),
        ("text", "it returned 'good', which is not a number"),
        ("nan", "it returned nan, which is not finite"),
        ("none", "it returned None, which is not a number"),
        ("nested", "its dict has for 'a' {'b': 1}, which is not a number"),
        ("other", "it returned length, and right, length before"),
        ("exit", "SystemExit: 3"),
        ("die", "its process ended with status 7"),
    ],
)
def test_a_call_that_fails_is_counted_with_its_row(file: Path, answer: str, why: str) -> None:
    found = scores_of(f"{file}:faults", ["good", answer, "bad", answer])
    assert (found.means, found.records, found.failed) == ({"right": 0.5, "length": 3.5}, 4, 2)
    assert found.error.startswith("in row 2: ") and why in found.error
    assert "failed for 2 of 4 answers; the means are over the other 2" in found.failures


def test_calls_that_hang_are_ended(file: Path) -> None:
    found = scores_of(f"{file}:faults", ["hang", "good", "hang", "hang", "hang", "good", "stdin"], seconds=1.5)
    assert (found.failed, found.means["right"]) == (6, 1.0), "after three in a row the rest is not tried"
    assert found.error == "in row 1: it took longer than 1.5 s"
    assert scores_of(f"{file}:faults", ["stdin"]).means == {"faults": 0}


def test_the_built_in_metrics() -> None:
    assert scores_of("exact", [" good\n", "Good"]).means == {"exact": 0.5}
    found = scores_of("sample", ["good"]).means
    assert list(found) == ["exact", "valid_json", "topic", "order", "urgent"] and found["exact"] == 0
    from graftune.data.sample import score_answer

    line = '{"topic": "refund", "order": 7, "urgent": true}'
    assert set(score_answer(line, line).values()) == {1.0}


@pytest.mark.parametrize(
    ("metric", "why"),
    [
        ("exactly", "write exact or sample, or file.py:function"),
        ("missing.py:f", "there is no such file"),
        ("{file}:nothing", "it has no function nothing"),
        ("{file}:strange", "it takes text; a metric takes some of prompt, answer, reference, record"),
        ("{broken}:f", "SyntaxError"),
    ],
)
def test_a_metric_that_cannot_be_used_is_refused_at_once(file: Path, metric: str, why: str) -> None:
    broken = file.with_name("broken.py")
    broken.write_text("def f(:")
    with pytest.raises(GraftuneError, match=why):
        check_metric(Config.of({"metric": metric.format(file=file, broken=broken)}))


BEST = Progress(best_loss=1.0, best_step=1, best_metric=0.5, best_failed=2)
ALL_FAILED = Progress(best_loss=1.0, best_step=1, best_failed=9)


@pytest.mark.parametrize(
    ("best", "loss", "metric", "failed", "goal", "better"),
    [
        (BEST, 2.0, 0.6, 2, "max", True),
        (BEST, 0.1, 0.4, 2, "max", False),
        (BEST, 2.0, 0.4, 2, "min", True),
        (BEST, 0.1, 0.6, 2, "min", False),
        (BEST, 0.9, 0.5, 2, "max", True),  # equal: by the loss
        (BEST, 1.1, 0.5, 2, "max", False),
        (BEST, 2.0, 0.1, 1, "max", True),  # fewer failed calls
        (BEST, 0.1, 0.9, 3, "max", False),
        (BEST, 0.1, None, 9, "max", False),  # every call failed
        (ALL_FAILED, 0.9, None, 9, "max", True),  # both: by the loss
        (ALL_FAILED, 1.1, None, 9, "max", False),
        (ALL_FAILED, 2.0, 0.1, 3, "max", True),  # known for the first time
        (Progress(), math.inf, None, 0, "max", True),
    ],
)
def test_which_evaluation_is_better(
    best: Progress, loss: float, metric: float | None, failed: int, goal: str, better: bool
) -> None:
    assert is_better(best, loss, metric, failed, goal) == better


def test_eval_measures_answers(tiny_folder, tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "held.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"ask {i}", "response": "x", "more": i}) + "\n" for i in range(3)))
    with file.open("a") as source:
        source.write("\ndef more(record):\n    return record['more']\n")
    line = ["eval", str(tiny_folder("llama-shallow")), str(data), "--device", "cpu", "--sample-tokens", "2"]
    assert main([*line, "--metric", f"{file}:more", "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"] == {"more": 1.0} and found["metric_records"] == 3 and "metric_failed" not in found
    assert main([*line, "--metric", "exact", "--metric-records", "2", "--quiet"]) == 0
    assert "exact" in capsys.readouterr().out
