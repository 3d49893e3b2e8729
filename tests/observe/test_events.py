"""metrics.jsonl survives kills, torn lines, resumes and numbers that JSON does not know."""

from __future__ import annotations

import errno
import io
import json
import os
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftune.errors import GraftuneError
from graftune.observe.events import (
    EventLog,
    evals,
    plain,
    read_events,
    standing,
    steps,
    to_json,
)
from tests.support.characters import CHARACTERS


def test_lines_are_whole_json_with_event_and_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with EventLog(path) as log:
        log.emit("run_start", base="é\u2028", folder=tmp_path)
        assert len(path.read_bytes().splitlines()) == 1, "flushed at once"
        log.emit("step", step=1, loss=float("nan"), grad_norm=float("inf"), lr=np.float32(0.5), tokens=torch.tensor(3))
    first, second = (json.loads(line) for line in path.read_text().split("\n")[:-1])
    assert first["event"] == "run_start" and first["time"] > 1e9 and first["base"] == "é\u2028"
    assert second["loss"] is None and second["grad_norm"] is None
    assert second["lr"] == 0.5 and second["tokens"] == 3
    assert plain({"b": 10**30, 3: (1,), "c": date(2026, 1, 2)}) == {"b": None, "3": [1], "c": "2026-01-02"}
    assert read_events(path) == [first, second]


def test_what_json_cannot_hold_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    with EventLog(tmp_path / "m.jsonl") as log:
        with pytest.raises(TypeError, match="object"):
            log.emit("step", thing=object())
        log.emit("step", step=1)
    assert len(read_events(tmp_path / "m.jsonl")) == 1


def test_a_log_cut_anywhere_reads_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with EventLog(path) as log:
        for step in range(1, 3):
            log.emit("step", step=step, loss=1.5)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):  # also right behind a whole event, without its newline
        path.write_bytes(whole[:cut])
        before = read_events(path)
        assert [e["step"] for e in before] == list(range(1, len(before) + 1))
        with EventLog(path) as log:
            log.emit("resume", step=len(before))
        after = read_events(path)
        assert after[:-1] == before and after[-1]["event"] == "resume"
        assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_a_line_is_written_whole_or_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes ten bytes at a time, and is then full amid a line."""

    class Disk(io.FileIO):
        room = 1000

        def write(self, line: bytes) -> int:  # type: ignore[override]
            if self.room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= 10
            return super().write(line[:10])

    path, flushed = tmp_path / "m.jsonl", list[int]()
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.fstat(handle).st_ino))
    with EventLog(path) as log:
        log._file.close()
        log._file = disk = Disk(path, "ab")
        log.emit("step", step=1)
        log.sync()
        assert flushed == [path.stat().st_ino]
        whole, disk.room = path.read_bytes(), 20
        with pytest.raises(OSError, match=r"No space left on device: .*m\.jsonl"):
            log.emit("step", step=2)
        assert path.read_bytes() == whole and [e["step"] for e in read_events(path)] == [1]
        disk.room = 1000
        log.emit("step", step=2)
    assert [e["step"] for e in read_events(path)] == [1, 2]


def test_a_tail_of_zeros_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with EventLog(path) as log:
        log.emit("step", step=1)
    path.write_bytes(path.read_bytes() + b"\0" * 40)
    assert len(read_events(path)) == 1
    path.write_bytes(path.read_bytes() + b"\n")
    assert len(read_events(path)) == 1
    EventLog(path).close()
    assert path.read_bytes().count(b"\0") == 0


def test_a_bad_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"event": "a"}\n{"event": \n{"event": "b"}\n')
    with pytest.raises(GraftuneError, match="line 2"):
        read_events(path)


def test_a_resumed_step_replaces_the_first(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with EventLog(path) as log:
        log.emit("run_start")
        log.emit("eval", step=0, loss=9.0)
        for step in range(1, 7):
            log.emit("step", step=step, loss=1.0)
        log.emit("eval", step=6, loss=5.0)
        log.emit("resume", step=4)
        log.emit("step", step=5, loss=2.0)
    events = read_events(path)
    assert [(e["step"], e["loss"]) for e in steps(events)] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2)]
    assert [e["step"] for e in evals(events)] == [0]
    ended = [{"event": kind, "step": step} for kind, step in (("step", 3), ("run_end", 3), ("resume", 3), ("step", 4))]
    assert [e["event"] for e in standing(ended)] == ["step", "resume", "step"], "a run that goes on has not ended"


def test_without_resume_events_the_latest_of_each_step_counts() -> None:
    events = [{"event": "step", "step": s, "loss": float(i)} for i, s in enumerate([1, 2, 3, 2, 3])]
    assert [(e["step"], e["loss"]) for e in steps(events)] == [(1, 0.0), (2, 3.0), (3, 4.0)]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(CHARACTERS), st.lists))
def test_to_json_is_always_strict(value: object) -> None:
    text = to_json({"value": value})
    assert text.isascii() and "\n" not in text
    json.loads(text, parse_constant=lambda name: pytest.fail(name))


def test_a_long_last_line_is_found(tmp_path: Path) -> None:
    """The end of the log is looked at in growing pieces."""
    log = tmp_path / "metrics.jsonl"
    long = json.dumps({"event": "sample", "step": 2, "answers": ["a" * 300_000]})
    for tail, want in (("\n", 2), ("", 2), ("[\n", 1), ('\n{"event": "st', 2)):
        log.write_text('{"event": "step", "step": 1}\n' + long + tail)
        with EventLog(log) as opened:
            opened.emit("resume", step=1)
        assert len(read_events(log)) == want + 1
