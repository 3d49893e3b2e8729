"""The state of a run tells the truth, from its folder alone and without its lock being taken."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from graftune.dashboard import states
from graftune.dashboard.states import Heartbeat, state_of
from graftune.dashboard.summary import RunSummary
from graftune.io.lock import FolderLock, LockOwner
from tests.dashboard.folders import append, end, start, step, write_run


def state(run: Path, holder: LockOwner | None) -> tuple[str, str]:
    summary = RunSummary(run / "metrics.jsonl")
    summary.advance()
    return tuple(state_of(run, summary, holder))


def phase(name: str) -> dict[str, Any]:
    return {"event": "phase", "phase": name}


GO_ON = "go on with: graftune train --resume RUN"
BEST = "the best validation loss was 1.5, at step 5"
# What happens in a run's folder, who holds its lock after that and since when, and what it says. In the order of time.
TRAINS, GONE = 999.0, None
STORY: list[tuple[list[dict[str, Any]], float | None, str, str]] = [
    ([], TRAINS, "preparing", ""),
    ([start(9)], TRAINS, "preparing", ""),
    ([phase("evaluating")], TRAINS, "evaluating", ""),
    ([phase("compiling")], TRAINS, "compiling", ""),
    ([step(1), phase("training"), step(2)], TRAINS, "training", "training, step 2 of 9 done"),
    ([phase("sampling")], TRAINS, "sampling", "answers are sampled and rewarded, step 2 of 9 done"),
    ([phase("finalising")], TRAINS, "finalising", ""),
    ([], GONE, "died", f"its process ended at step 2 of 9 without a final event; {GO_ON}"),
    ([end(2, "interrupted", signal=15)], GONE, "stopped", f"stopped by SIGTERM at step 2 of 9; {GO_ON}"),
    ([], 1999.0, "stopped", ""),  # the process that wrote it has not ended yet
    ([], 2001.0, "preparing", ""),  # a resume has begun
    ([{"event": "resume", "step": 1}], TRAINS, "training", ""),
    ([], GONE, "died", ""),
    (
        [{"event": "eval", "step": 5, "loss": 1.5}, end(5, "early stop")], GONE, "finished",
        f"stopped early at step 5 of 9, because validation no longer improved; {BEST}",
    ),
    ([{"event": "extend", "steps": 20}, step(6), end(20)], GONE, "finished", f"finished at step 20 of 20; {BEST}"),
]  # fmt: skip


def test_from_beginning_to_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    for happened, since, name, says in STORY:
        append(run, *happened)
        found, sentence = state(run, None if since is None else replace(LockOwner.me(), since=since))
        assert found == name and says.replace("RUN", str(run)) in ("", sentence), (happened, sentence)


@pytest.mark.parametrize(
    ("stopped", "says"),
    [
        ("not finite", "stopped itself at step 3 of 9: updates in a row were skipped because numbers were not finite"),
        ("warning", "stopped itself at step 3 of 9, as stop_on_warning asks; its last warning says why"),
        ("another\nreason", "stopped at step 3 of 9 (another reason)"),
    ],
)
def test_a_run_that_its_guard_stopped_is_not_finished(tmp_path: Path, stopped: str, says: str) -> None:
    run = write_run(tmp_path / "r", start(9), step(3), end(3, stopped))
    assert state(run, None) == ("stopped", f"{says}; go on with: graftune train --resume {run}")


def test_a_resume_of_a_run_that_died_is_being_prepared(tmp_path: Path) -> None:
    run, me = write_run(tmp_path / "r", start(9), phase("training"), step(3)), LockOwner.me()
    preparing, says = state(run, me)
    assert preparing == "preparing" and says.startswith("a resume is being prepared, at step 3 of 9")
    append(run, {"event": "resume", "step": 2, "time": me.since + 1})
    assert state(run, me)[0] == "training"


def test_a_copy_of_a_folder_does_not_train(tmp_path: Path) -> None:
    for name in ("mine", "copy"):
        (tmp_path / name).mkdir()
    with FolderLock(tmp_path / "mine") as lock:
        shutil.copy2(lock.path, tmp_path / "copy")
        assert Heartbeat(tmp_path / "mine").holder() is not None and Heartbeat(tmp_path / "copy").holder() is None


def test_the_process_of_this_machine_is_looked_up(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path)
    assert heartbeat.holder() is None
    with FolderLock(tmp_path) as lock:
        os.utime(lock.path, (0, 0))  # a process that was stopped has no heartbeat, and lives
        holder = heartbeat.holder()
        assert holder is not None and holder.pid == os.getpid()
        held = lock.path.read_bytes()
    assert heartbeat.holder() is None
    (tmp_path / ".lock").write_bytes(json.dumps(json.loads(held) | {"began": "7"}).encode())
    assert heartbeat.holder() is None, "another process has its number"
    for garbage in (b"", b"[", b"{}", b'{"pid": 1e999}', b'{"pid": "x", "began": 1, "machine": 2, "since": 3}'):
        (tmp_path / ".lock").write_bytes(garbage)
        assert heartbeat.holder() is None


def test_a_run_of_another_machine_has_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(states.time, "monotonic", lambda: now[0])
    path = tmp_path / ".lock"
    path.write_text(json.dumps(asdict(replace(LockOwner.me(), machine="elsewhere"))))
    heartbeat = Heartbeat(tmp_path)
    assert heartbeat.holder() is not None
    now[0] += 16
    assert heartbeat.holder() is None, "15 seconds without a beat"
    os.utime(path, (1.0, 1.0))  # the other machine's clock is years behind, but it beats
    assert heartbeat.holder() is not None
    now[0] += 14
    assert heartbeat.holder() is not None
    os.utime(path, (time.time() - 60, time.time() - 60))
    assert Heartbeat(tmp_path).holder() is None, "at the first look the clocks are all there is"
