"""Run folders that mean harm: the page shows them as far as they can be read, within bounded memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graftune.dashboard import line_reader, log
from graftune.dashboard import runs as runs_module
from graftune.dashboard.streams import _NewEvents
from graftune.dashboard.summary import RunSummary
from tests.dashboard.folders import client, lines, start, step, write_run


def strict(text: str | bytes) -> Any:
    """As a browser reads JSON."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_strangers_events_are_shown_as_far_as_they_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "FRESH", 0.0)
    run = write_run(tmp_path / "r", start(9), step(1))
    with open(run / "metrics.jsonl", "ab") as file:
        for depth in (50, 200, 900, 5000):
            file.write(b'{"event": "warning", "text": ' + b"[" * depth + b"]" * depth + b"}\n")
        file.write(b'{"event": "eval", "step": 1, "loss": NaN}\n{"event": "eval", "step": 2, "loss": 1e999}\n')
        file.write(b'{"event": "step", "step": 2, "__proto__": 1, "constructor": NaN}\n{"event": "__proto__"}\n')
        file.write(b'{"event": "step", "step": 3, ' + b", ".join(b'"n%d": 1' % n for n in range(9000)) + b"}\n")
        file.write(b'{"event": "memory", "step": 3, "owners": {' + b'"a": 1, ' * 9000 + b'"b": [1, 2]}}\n')
        file.write(b'{"event": "warning", "text": "' + b"x" * (2 * line_reader.LONGEST) + b'"}\n')
        file.write(lines(step(4)))
    (run / "plan.json").write_text('{"expected": NaN, "deep": ' + "[" * 60 + "]" * 60 + "}")
    page = client(tmp_path)
    found = strict(page.get("/api/runs/r").text)
    assert found["steps"] == 4 and [e["loss"] for e in found["evals"]] == [None, None]
    assert found["warnings"][0]["text"].startswith("[[[") and "cannot be read" in found["warnings"][-1]["text"]
    assert found["plan"]["expected"] is None and "[cut]" in str(found["plan"]["deep"])
    curves = strict(page.get("/api/runs/r/series").text)
    assert curves["steps"] == [1, 2, 3, 4] and len(curves["available"]) == log.MOST_CURVES
    new, messages = _NewEvents(run / "metrics.jsonl"), list[str]()
    while not messages or new.behind:
        messages += new.read()
    assert strict(messages[-1].removeprefix("data: "))["event"]["step"] == 4


def test_a_long_log_is_read_in_several_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_reader, "CHUNK", 4096)
    evals = [{"event": "eval", "step": n, "loss": 9.0 - n % 7} for n in range(1, 300)]
    run = write_run(tmp_path / "r", start(9), *evals, *(step(n) for n in range(1, 500)))
    summary = RunSummary(run / "metrics.jsonl")
    summary.advance()
    assert summary.best() == (3.0, 6) and summary.steps == 499
    monkeypatch.setattr(RunSummary, "SECONDS", -1.0)
    slow, calls = RunSummary(run / "metrics.jsonl"), 0
    while not calls or slow.behind:
        slow.advance()
        calls += 1
    assert calls > 10 and slow.evals == summary.evals and slow.step == summary.step
