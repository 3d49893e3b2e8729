"""The benchmark of the refusal without a GPU: its command lines, both ways to run them, and its logic on a CPU where
memory is said to be short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.cases import SHAPES
from benchmarks.peers import write_folder

from benchmarks import refusal
from graftune.plan import job

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refusal") / "base"
    write_folder(SHAPES["tiny"], folder, CPU)
    return folder


@pytest.mark.parametrize("run", [refusal.command, refusal.through_api])
def test_refused_and_then_run_as_suggested(
    run: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def short(device: torch.device, free: int) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(job, "free_bytes", lambda device: free)
            yield

    def attempt(line: Sequence[str], work: Path, device: torch.device) -> dict[str, Any]:
        code = run(line)
        said = capsys.readouterr().err.strip().splitlines()[-1]
        return {"exit": code, "said": said, "allocated": 0, "reserved": 1}

    found = refusal.measure(base, tmp_path, CPU, 2048, attempt, short)
    assert found["refused"]["exit"] == 2 and not found["refused"]["folder"]
    assert found["refused"]["said"].startswith("graftune: ") and "training needs" in found["refused"]["said"]
    assert found["suggestion"] == {"--recompute": "selective"}
    assert found["suggested"]["exit"] == 0 and found["suggested"]["settings"]["recompute"] == "selective"
    assert found["suggested"]["needed"] <= found["free"] < found["needed"]["none"]
    assert all(goal["met"] for goal in found["goals"])
    worse = found | {"refused": found["refused"] | {"exit": 0, "allocated": 1, "folder": True}, "suggested": {}}
    assert [goal["met"] for goal in refusal.goals(worse)] == [False, False, False, False, None]


def test_in_a_process_of_its_own(base: Path, tmp_path: Path) -> None:
    missing = refusal.line_of(base, tmp_path / "nothing.jsonl", CPU, 64)
    found = refusal.apart(missing, tmp_path, CPU)
    assert found["exit"] == 2 and "nothing.jsonl" in found["said"] and "error" not in found
    assert (found["allocated"], found["reserved"]) == (0, 0) and found["through"] in ("graftune.cli", "graftune.api")


def test_command_lines() -> None:
    line = refusal.line_of(Path("base"), Path("data"), CPU, 64)
    assert refusal.settings_of(line)["tokens_per_micro_batch"] == 64 and refusal.settings_of(line)["base"] == "base"
    said = "x: training needs 9 GiB and 8 GiB are free; --base-dtype nf4 --recompute full would need 5.0 GiB"
    changed = refusal.settings_of(refusal.with_settings(line, refusal.suggested(said)))
    assert (changed["recompute"], changed["base_dtype"]) == ("full", "nf4")
    assert changed.keys() - refusal.settings_of(line).keys() == {"base_dtype"}
    assert refusal.suggested("training needs 9 GiB; no policy makes it fit: take a smaller model") == {}
