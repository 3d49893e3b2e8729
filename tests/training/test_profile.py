"""graftune profile: of a run folder and of a base, its files and its refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from graftune.cli import main
from graftune.settings.config import Config
from tests.training.runs import write_data


def settings(tiny_folder, tmp_path: Path) -> Config:
    values = {
        "base": str(tiny_folder("llama-shallow")), "data": str(write_data(tmp_path / "data.jsonl")), "device": "cpu",
        "compute_dtype": "fp32", "tokens_per_step": 128, "tokens_per_micro_batch": 64, "max_seq_len": 64,
    }  # fmt: skip
    return Config.of(values)


def test_a_run_gets_its_profile_and_trace(tiny_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    settings(tiny_folder, tmp_path).save(run / "config.yaml")
    assert main(["profile", str(run), "--json", "--steps", "2", "--trace", str(tmp_path / "t.json")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((run / "profile.json").read_text())
    trace = json.loads((run / "profile-trace.json").read_text())
    assert trace == json.loads((tmp_path / "t.json").read_text()) and trace["traceEvents"]
    wanted = """version device gpu model shape captured step_ms plain_ms eager_ms floor_ms floor_share owned bottleneck
        phases layers operations hotspots tree"""
    assert set(wanted.split()) <= set(document)
    assert document["gpu"].endswith("products in fp32"), "config.yaml also holds what auto chose"
    assert document["owned"] > 0.95 and document["shape"]["micro_batches"] > 1
    assert {row["name"] for row in document["beside"]} >= {"checkpoint"}
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "profile-trace.json", "profile.json"]


def test_a_closed_pipe_does_not_lose_the_measurement(tiny_folder, tmp_path: Path, monkeypatch) -> None:
    """`graftune profile RUN | head -2`: rich leaves the process when it cannot write."""
    settings(tiny_folder, tmp_path).save(tmp_path / "config.yaml")
    monkeypatch.setattr("graftune.cli.profile.show", lambda *_: sys.exit(1))
    assert main(["profile", str(tmp_path), "--steps", "2", "--quiet"]) == 141
    assert json.loads((tmp_path / "profile.json").read_text())["steps"] == 2


def test_a_base_is_profiled_without_a_folder(
    tiny_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tiny_folder, tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    words = ["--device", "cpu", "--tokens-per-step", "64", "--max-seq-len", "64", "--steps", "2"]
    assert main(["profile", config.base.base, str(config.data.data), *words]) == 0
    said = capsys.readouterr().out
    assert "of the step has an owner" in said and "a profiled step takes" in said and "backward" in said
    assert sorted(tmp_path.iterdir()) == before, "nothing is written that was not asked for"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "1"], "--steps is 1"),
        (["nowhere/at/all"], "nowhere/at/all"),
        (["--trace", "."], "cannot be written"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err
