"""graftune runs, and the page that train --watch opens."""

from __future__ import annotations

import io
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import graftune
from graftune.cli import main
from graftune.cli import watch as page_process
from graftune.observe.console import Console
from graftune.observe.profile import Profile, Span, StepSample
from graftune.spans import Name
from tests.cli.conftest import Engine
from tests.dashboard.folders import end, start, step, trains, write_run

Capture = pytest.CaptureFixture[str]


def test_runs_are_listed_for_people_and_programs(tmp_path: Path, capsys: Capture) -> None:
    write_run(tmp_path / "one", start(3), step(1), {"event": "eval", "step": 1, "loss": 1.25}, end(3), rank=4)
    write_run(tmp_path / "t\x1b[2Jwo", start(9), step(1), rank=8)
    write_run(tmp_path / "live", start(9), step(1), rank=8)
    with trains(tmp_path / "live"):
        assert main(["runs", str(tmp_path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["runs", str(tmp_path)]) == 0
    assert found["differing"] == ["rank"] and found["root"] == str(tmp_path)
    assert [(run["name"], run["state"]) for run in found["runs"]] == [
        ("live", "training"), ("one", "finished"), ("t\x1b[2Jwo", "died"),
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "\x1b" not in said and "1.2500 at 1" in said and "its process ended at step 1 of 9" in said
    (tmp_path / "none").mkdir()
    assert main(["runs", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out == f"there is no run below {tmp_path / 'none'}\n"
    assert main(["runs", str(tmp_path / "missing")]) == 2
    assert "there is no such folder; give a run folder" in capsys.readouterr().err


def test_quiet_output_has_the_address(capsys: Capture) -> None:
    page: Any = page_process.TrainingPage("runs", Console(quiet=True))
    page.process = SimpleNamespace(stdout=io.StringIO("http://127.0.0.1:1/\n"))
    page._print_address()
    assert capsys.readouterr().err == "http://127.0.0.1:1/\n"


def test_a_profile_looks_first_and_writes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The steps are a stand-in's."""
    sample = StepSample(2.0, [Span(Name("forward", 0, "product"), 0.0, 2.0)])
    profiled: list[Any] = []
    module: Any = ModuleType("graftune.training.profile")
    module.profile = lambda whole, console, steps: (
        profiled.append(whole.train.tokens_per_step) or Profile([sample], facts={"model": "m", "gpu": "g"})
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run = write_run(tmp_path / "run", start(3), step(1), tokens_per_step=512)
    for trace in (tmp_path / "none" / "t.json", tmp_path):
        assert main(["profile", str(run), "--trace", str(trace)]) == 2
    assert not profiled and "cannot be written; give --trace" in capsys.readouterr().err
    assert main(["profile", str(run), "--tokens-per-step", "64"]) == 0
    assert profiled == [64] and not (run / "profile.json").exists()
    assert "not the run's own settings: its profile.json is left" in capsys.readouterr().err
    assert main(["profile", str(run), "--trace", str(tmp_path / "t.json")]) == 0
    assert json.loads((run / "profile.json").read_text())["step_ms"] == 2.0 and (tmp_path / "t.json").is_file()
    (run / "config.yaml").unlink()
    assert main(["profile", str(run)]) == 2
    assert "is a run folder without its config.yaml; give a base and data" in capsys.readouterr().err


def test_train_opens_a_page_beside_itself(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The real process, which imports no torch; the training is a stand-in."""
    monkeypatch.setattr(page_process, "PORT", 0)
    finished = engine.train
    run, shown = write_run(tmp_path / "runs" / "mine", start(3), step(1)), list[dict[str, Any]]()

    def train(config: Any, *, console: Any, callbacks: Any = (), **how: Any) -> Any:
        (page,) = callbacks
        said: list[str] = []
        monkeypatch.setattr(console, "note", said.append)
        for event in (start(3), step(1)):
            assert page(event) is None
        limit = time.monotonic() + 60
        while not said and time.monotonic() < limit:
            time.sleep(0.05)
        address = said[0].removeprefix("watch it at ")
        with urllib.request.urlopen(f"{address}api/runs", timeout=30) as answer:
            shown.append(json.load(answer) | {"pid": page.process.pid})
        return finished(config, console=console, **how)

    monkeypatch.setattr(engine, "train", train)
    monkeypatch.setenv("PYTHONPATH", str(Path(graftune.__file__).parents[1]))
    assert main(["train", "--out", str(run), "--watch"]) == 0
    assert [one["id"] for one in shown[0]["runs"]] == ["mine"] and shown[0]["root"] == str(run.parent)
    with pytest.raises(ProcessLookupError):
        os.kill(shown[0]["pid"], 0)
