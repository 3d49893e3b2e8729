"""graftune init: the file that it writes trains as it is, says why each value is there, and replaces no other file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from graftune.cli import main
from graftune.settings import auto
from graftune.settings.config import Config
from tests.training.runs import write_data

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def base(tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "my data: #1.jsonl", 8)
    return str(tiny_folder("llama"))


DATA = "my data: #1.jsonl"


def test_the_file_trains(base: str, capsys: Capture) -> None:
    assert main(["init", base, DATA, "--device", "cpu", "--val-split", "0.25"]) == 0
    out, text = capsys.readouterr().out, Path("graftune.yaml").read_text()
    assert out.count("row ") >= 3 and "⟦" in out, "the masks of three rows"
    assert re.search(r"\d+ steps of up to \d+ tokens", out) and "expected time" in out and "expected peak" in out
    settings = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.search(r"  # \S", line) for line in settings), "every value has a reason"
    assert re.search(r"^lr: auto +# auto: lr 0.001 ", text, re.M), "what auto is now"
    assert re.search(r"^val_split: 0.25 +# as given", text, re.M)
    config = Config.load("graftune.yaml")
    assert config.data.data == DATA and config.train.epochs > 3, "3 epochs of 6 examples make 18 steps"
    quick = ["--json", "--quiet", "--samples", "0", "--out", "run"]
    assert main(["train", "-c", "graftune.yaml", *quick]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert steps >= auto.TOO_FEW and f"# {steps} steps" in text


def test_json_and_no_file_is_lost(base: str, capsys: Capture) -> None:
    Path("mine.yaml").write_text("rank: 4\n")
    assert main(["init", base, DATA, "--out", "mine.yaml"]) == 2
    assert "exists already" in capsys.readouterr().err and Path("mine.yaml").read_text() == "rank: 4\n"
    for wrong in (".", "nowhere/mine.yaml"):
        assert main(["init", base, DATA, "--out", wrong, "--force"]) == 2
        assert f"{wrong}: is " in capsys.readouterr().err, "found before the data is read"
    assert main(["init", base, DATA, "--out", "mine.yaml", "--force", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == "mine.yaml" and found["plan"]["fits"] and found["expected_run"]["steps"] >= auto.TOO_FEW
    assert "tokens_per_step: auto" in Path("mine.yaml").read_text()
