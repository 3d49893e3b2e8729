"""Runs over an fp8 base.

FP8 needs a GPU; here its references compute, by the run's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graftune.api import train
from graftune.kernels import fp8
from graftune.observe.console import Console
from graftune.settings.config import Config
from tests.support import tiny
from tests.training.runs import adapter_bytes, write_data
from tests.training.test_loop import figures, stopped_copy

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths are multiples of 16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.VARIANT_OPTIONS, "llama-untied", {"intermediate_size": 96})
        return tiny.make_folder("llama-untied", tmp_path_factory.mktemp("fp8") / "base")


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "require", lambda device, compute: None)


def settings(folder: Path, out: Path, **more: Any) -> Config:
    data = out.parent / "data.jsonl"
    if not data.exists():
        write_data(data, rows=40)
    values = {
        "base": str(folder), "base_dtype": "fp8", "data": str(data), "out": str(out), "device": "cpu", "rank": 4,
        "compute_dtype": "fp32", "threads": 1, "lr": 0.01, "epochs": 2, "tokens_per_step": 256, "eval_every": 2,
        "tokens_per_micro_batch": 128, "save_every": 2, "keep_last": 99, "samples": 0, "score": False, "patience": 0,
    }  # fmt: skip
    return Config.of(values | more)


def test_resumed_is_straight(folder: Path, tmp_path: Path, on_any_device):
    straight = train(settings(folder, tmp_path / "straight"), console=QUIET).folder
    resumed = stopped_copy(straight, tmp_path / "resumed", after=2)
    train(Config.of_run(resumed), console=QUIET, resume=str(resumed))
    assert figures(resumed) == figures(straight) and adapter_bytes(resumed) == adapter_bytes(straight)
