"""What the page is told of runs: the list, one run, its curves and its events, from folders written by hand."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from graftune.dashboard import line_reader
from graftune.dashboard import runs as runs_module
from graftune.dashboard.log import Log
from graftune.dashboard.reading import read_settings
from graftune.dashboard.runs import WatchedRun
from graftune.dashboard.streams import _NewEvents
from graftune.dashboard.summary import RunSummary
from graftune.errors import GraftuneError
from graftune.io.yaml_file import read_yaml
from graftune.observe.events import evals, read_events, steps, worked_seconds
from graftune.settings.config import Config
from tests.dashboard.folders import append, client, end, lines, start, step, trains, write_run


@pytest.fixture(autouse=True)
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "FRESH", 0.0)


def ask(page: Any, path: str, status: int = 200) -> Any:
    answer = page.get(path)
    assert answer.status_code == status, answer.text
    return answer.json()


def evaluated(number: int, loss: float | None) -> dict[str, Any]:
    return {"event": "eval", "time": 1000.0 + number, "step": number, "loss": loss}


def test_the_list_and_what_differs(tmp_path: Path) -> None:
    evaluations = [evaluated(0, 3.0), evaluated(2, 1.5), evaluated(3, 1.75)]
    write_run(tmp_path / "a", start(3), step(1), step(2), step(3), *evaluations, end(3), rank=8, data="x.jsonl")
    write_run(tmp_path / "deep/er" / "b <i>c", start(5), step(1), step(2), rank=16, data="x.jsonl")
    (tmp_path / "no-run").mkdir()
    with trains(tmp_path / "deep/er" / "b <i>c"):
        found = ask(client(tmp_path), "/api/runs")
    assert found["root"] == str(tmp_path) and found["differing"] == ["rank"]
    one, other = found["runs"]
    assert (one["id"], one["name"], one["state"], one["steps"], one["max_steps"]) == ("a", "a", "finished", 3, 3)
    assert (one["best_eval"], one["best_eval_step"], one["last_loss"]) == (1.5, 2, 4.0 / 3)
    assert one["sentence"] == "finished at step 3 of 3; the best validation loss was 1.5, at step 2"
    assert (one["base"], one["data"], one["method"]) == ("bundled SmolLM2-135M-Instruct", "x.jsonl", "lora")
    assert (one["started"], one["updated"], one["settings"]["rank"]) == (1000.0, 2000.0, 8)
    assert (other["id"], other["name"], other["state"]) == ("deep/er/b <i>c", "b <i>c", "training")
    assert other["sentence"] == "training, step 2 of 5 done" and other["tok_s"] == 1000.0


def test_settings_that_a_run_does_not_use_do_not_differ(tmp_path: Path) -> None:
    used = {"answer_tokens": 4, "best": "loss", "reward": ["r.py"], "lr": 1e-5}
    write_run(tmp_path / "rewards", start(3), **used)
    write_run(tmp_path / "answers", start(3), **used | {"answer_tokens": 256, "best": "margin", "reward": []})
    assert ask(client(tmp_path), "/api/runs")["differing"] == ["reward"]


def test_one_run_in_full(tmp_path: Path) -> None:
    sample = {"event": "sample", "answers": ["<b>x</b>", "y", "scored"], "prompts": ["p", "q", "r"], "shown": 2}
    sample["references"] = ["right"]  # a base that was asked by an earlier version has none
    events = [
        start(2, command="graftune train m.gguf 'a b.jsonl'"), {"event": "memory", "step": 1, "planned": 5},
        step(1), step(2), {"event": "warning", "step": 2, "text": "\u001b[2J<script>"}, {**sample, "step": 0},
        {**sample, "step": 2, "answers": ["z", "w", "scored"]}, evaluated(2, 1.0), end(2),
    ]  # fmt: skip
    run = write_run(tmp_path / "r", *events)
    (run / "plan.json").write_text('{"peak": 7}')
    for name in ("adapter", "checkpoints/step-2", "checkpoints/step-10", "checkpoints/step-3.part"):
        (run / name).mkdir(parents=True)
    page = client(tmp_path)
    found = ask(page, "/api/runs/r")
    assert found["command"] == "graftune train m.gguf 'a b.jsonl'" and found["plan"] == {"peak": 7}
    assert found["memory"]["planned"] == 5 and found["end"]["stopped"] == "finished" and not found["profile"]
    assert found["warnings"] == [{"step": 2, "text": "\u001b[2J<script>"}]
    assert found["samples"] == [
        {"step": 2, "prompt": "p", "base": "<b>x</b>", "tuned": "z", "reference": "right"},
        {"step": 2, "prompt": "q", "base": "y", "tuned": "w", "reference": None},
    ]
    assert found["checkpoints"] == ["adapter", "step-10", "step-2"] and found["evals"][0]["loss"] == 1.0
    assert found["config_yaml"] == (run / "config.yaml").read_text()
    assert "has no profile" in ask(page, "/api/runs/r/profile", 404)["error"]
    (run / "profile.json").write_text('{"version": 1}')
    assert ask(page, "/api/runs/r/profile") == {"version": 1} and ask(page, "/api/runs/r")["profile"]
    # A run that is watched by itself is called by its folder's name.
    assert [one["id"] for one in ask(client(run), "/api/runs")["runs"]] == ["r"]
    assert ask(client(run), "/api/runs/r")["steps"] == 2


def test_names_come_as_they_were_sent(tmp_path: Path) -> None:
    """A run called as a view is, below a run's own name; names with a percent sign; bytes that are no text."""
    names = ["a/series", "50% off", "x?y#z", "ü"]
    for name in names:
        write_run(tmp_path / name, start(1), step(1))
    raw = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(raw)
    Path(os.fsdecode(raw), "metrics.jsonl").write_bytes(lines(start(9)))
    page = client(tmp_path)
    listed = [run["id"] for run in ask(page, "/api/runs")["runs"]]
    assert sorted(listed) == sorted([*names, "caf\\xe9"])
    for key in listed:
        assert ask(page, f"/api/runs/{quote(key, safe='')}")["id"] == key
        assert ask(page, f"/api/runs/{quote(key, safe='')}/series")["names"] is not None
    assert ask(page, "/api/runs/nothing", 404) == {"error": "there is no such run in the watched folder"}


def test_curves_keep_spikes_and_follow_the_log(tmp_path: Path) -> None:
    count = 5000
    run = write_run(tmp_path / "r", start(count), *(step(n, loss=900.0 if n == 3333 else 1.0) for n in range(1, count)))
    page = client(tmp_path)
    found = ask(page, "/api/runs/r/series?names=loss,nothing&points=100")
    assert found["names"] == ["loss"] and len(found["steps"]) == len(found["values"]["loss"]) == 100
    assert found["steps"] == sorted(set(found["steps"])) and found["last"] == count - 1
    assert max(found["values"]["loss"]) == 900.0 and found["count"] == count - 1
    near = ask(page, "/api/runs/r/series?names=loss&points=100&from=3330&to=3335")
    assert near["steps"] == list(range(3330, 3336)) and near["values"]["loss"][3] == 900.0
    append(run, step(count, loss=None, tflops=2.5, reward_exact=0.5))
    assert ask(page, f"/api/runs/r/series?names=tflops&from={count}")["values"] == {"tflops": [2.5]}
    found = ask(page, f"/api/runs/r/series?from={count}")
    assert found["values"]["loss"] == [None] and found["values"]["reward_exact"] == [0.5], "of any loss or reward"
    assert not {"tflops", "tokens", "time"} & set(found["names"]) and "tflops" in found["available"]
    assert found["values"]["skipped"] == [0.0] and found["offset"] == (run / "metrics.jsonl").stat().st_size
    assert "whole number" in ask(page, "/api/runs/r/series?points=many", 400)["error"]


def test_a_resume_takes_back_what_came_after_it(tmp_path: Path) -> None:
    first = [start(9), *(step(n, loss=1.0) for n in range(1, 7)), evaluated(2, 2.0), evaluated(6, 0.5)]
    marks = [{"event": "resume", "step": 5}, {"event": "extend", "step": 5, "steps": 8, "steps_before": 9}]
    run = write_run(tmp_path / "r", *first, *marks, {"event": "resume", "step": 4}, step(5, loss=3.0))
    assert ask(client(tmp_path), "/api/runs/r")["marks"] == [{"step": 4, "label": "resumed"}]
    append(run, *marks)
    both = [{"step": 4, "label": "resumed"}, {"step": 5, "label": "resumed, shortened to 8"}]
    assert ask(client(tmp_path), "/api/runs/r")["marks"] == both
    path = run / "metrics.jsonl"
    log, summary = Log(path), RunSummary(path)
    log.advance()
    summary.advance()
    known = read_events(path)
    assert list(log.steps) == [e["step"] for e in steps(known)] == [1, 2, 3, 4, 5]
    assert list(log.values["loss"]) == [e["loss"] for e in steps(known)]
    assert [e["step"] for e in log.of("eval")] == [e["step"] for e in evals(known)] == [2]
    assert summary.best() == (2.0, 2) and summary.steps == 5
    append(run, start(3), step(1))
    log.advance()
    summary.advance()
    assert list(log.steps) == [1] and (summary.steps, summary.total, summary.evals) == (1, 3, {})
    path.write_bytes(lines(start(4)))  # another file in its place
    log.advance()
    assert not log.steps and log.of("run_start")[0]["steps"] == 4


def test_the_end_of_a_long_log_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list reads a part of a long log at a time. The last part may change the document and not the state."""
    monkeypatch.setattr(RunSummary, "SECONDS", 0.0)
    monkeypatch.setattr(line_reader, "CHUNK", 1 << 10)
    folder = write_run(tmp_path / "r", start(99), *(step(n) for n in range(1, 10)), evaluated(9, 3.0))
    append(folder, *({"event": "other", "time": 1000.0, "text": "." * 1000} for _ in range(3)), evaluated(8, 2.0))
    run, versions = WatchedRun("r", folder), set[int]()
    while run.document([])["best_eval"] != 2.0:
        run.refresh()
        assert run.version not in versions, "the document changed and its version did not"
        versions.add(run.version)


def test_the_time_of_a_run_is_what_it_worked(tmp_path: Path) -> None:
    """A day passes before the resume; what it took back was worked for, too."""
    day = 86400.0
    first = [start(9), *(step(n) for n in range(1, 7)), end(6, "interrupted", time=1010.0)]
    run = write_run(tmp_path / "r", *first, {"event": "resume", "step": 4, "time": day}, step(5, time=day + 5))
    found = ask(client(tmp_path), "/api/runs")["runs"][0]
    assert (found["worked_s"], found["last_began"], found["last_began_step"]) == (15.0, day, 4)
    assert (found["started"], found["updated"]) == (1000.0, day + 5)
    assert worked_seconds(read_events(run / "metrics.jsonl")) == 15.0
    append(run, {"event": "resume", "step": 5, "time": 9 * day})
    assert ask(client(tmp_path), "/api/runs")["runs"][0]["worked_s"] == 15.0
    append(run, start(3, time=10 * day), step(1, time=10 * day + 2))
    assert ask(client(tmp_path), "/api/runs")["runs"][0]["worked_s"] == 2.0
    assert worked_seconds(read_events(run / "metrics.jsonl")) == 2.0 and worked_seconds([]) is None


def test_a_watched_folder_becomes_a_run(tmp_path: Path) -> None:
    """It is empty when the page is opened; settings alone make no run of a folder that has runs in it."""
    page = client(tmp_path)
    assert ask(page, "/api/runs")["runs"] == []
    write_run(tmp_path / tmp_path.name, start(3))
    (tmp_path / "config.yaml").write_text("rank: 8\n")
    assert [one["max_steps"] for one in ask(page, "/api/runs")["runs"]] == [3]
    write_run(tmp_path, start(5), step(1))
    (found,) = ask(page, "/api/runs")["runs"]
    assert (found["id"], found["steps"], found["max_steps"]) == (tmp_path.name, 1, 5)


def test_torn_and_foreign_folders(tmp_path: Path) -> None:
    run = write_run(tmp_path / "torn", start(9), step(1), step(2))
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"event": "step", "st')
    write_run(tmp_path / "empty")
    (write_run(tmp_path / "foreign") / "metrics.jsonl").write_bytes(b'{"a": 1}\n[[[[\n\xff\xfe\n1,2\n' + lines(step(1)))
    (tmp_path / "foreign" / "config.yaml").write_text("- [unclosed\n")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "metrics.jsonl").symlink_to(run / "metrics.jsonl")
    os.mkfifo(write_run(tmp_path / "pipe", start(1)) / "profile.json")
    page = client(tmp_path)
    found = {run["id"]: run for run in ask(page, "/api/runs")["runs"]}
    assert set(found) == {"torn", "empty", "foreign", "pipe"} and {run["state"] for run in found.values()} == {"died"}
    assert found["torn"]["steps"] == 2 and "go on with: graftune train --resume" in found["torn"]["sentence"]
    assert found["empty"]["sentence"] == "ended before its first event, and no process is training in it"
    assert ask(page, "/api/runs/torn/series?names=loss")["steps"] == [1, 2]
    assert ask(page, "/api/runs/foreign")["warnings"][0]["text"].startswith("4 lines of metrics.jsonl cannot")
    ask(page, "/api/runs/pipe/profile", 404)
    for path, sentence in ((tmp_path / "none", "no such folder"), (run / "config.yaml", "is a file")):
        with pytest.raises(GraftuneError, match=sentence):
            client(path)


def test_settings_of_a_file_are_those_of_yaml(tmp_path: Path) -> None:
    awkward = {"data": "a: b # c\nd é" + "x" * 200, "map": {"prompt": "Q: x", "response": "1"}, "targets": ["qv"]}
    for number, values in enumerate(({}, awkward, {"data": [{"path": "a", "weight": 2}, {"path": "b"}]})):
        path = write_run(tmp_path / str(number), **values) / "config.yaml"
        tree = read_yaml(path)
        assert read_settings(path) == {k: v for section in tree.values() for k, v in section.items()}
        assert read_settings(path) == json.loads(json.dumps(Config.of_run(path.parent).flat()))
    path.write_text("rank: 8\nlora:\n  alpha: .nan\nwhen: 2026-01-01\n1: 2\n")
    assert read_settings(path) == {"rank": 8, "alpha": None, "when": "2026-01-01", "1": 2}


def test_events_from_a_place_in_the_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", start(3), step(1), end(1))
    page = client(tmp_path)
    size = (run / "metrics.jsonl").stat().st_size
    app: Any = page.app
    closing = app.state.server.closing
    late = threading.Timer(5, closing.set)  # older clients give lines only when all are there
    late.start()
    with page.stream("GET", "/api/runs/r/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = []
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
            if len(found) == 4:
                closing.set()
    late.cancel()
    assert found[0]["state"] == "finished" and found[-1]["offset"] == size
    assert [one["event"]["event"] for one in found[1:]] == ["run_start", "step", "run_end"]
    log = tmp_path / "r" / "metrics.jsonl"
    later = _NewEvents(log, found[-2]["offset"])
    assert [json.loads(text[6:])["event"]["event"] for text in later.read()] == ["run_end"] and later.read() == []
    log.write_bytes(lines(start(2)))
    assert later.read()[0].startswith("event: reset") and later.offset == log.stat().st_size
