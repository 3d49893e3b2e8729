"""A whole run on CUDA: captured = eager, resumed = straight, one shape and one capture, no wait between steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from graftune.api import train
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.session import parts
from graftune.settings.config import Config
from graftune.weights import checkpoint
from tests.gpu import ranked
from tests.training.runs import adapter_bytes, write_data
from tests.training.test_loop import figures

pytestmark = pytest.mark.gpu
QUIET = Console(quiet=True)


def settings(folder: Path, out: Path, **more: Any) -> Config:
    data = write_data(out.parent / "data.jsonl", rows=40)
    values = {
        "base": str(folder), "data": str(data), "out": str(out), "device": "cuda", "compute_dtype": "bf16", "rank": 8,
        "dropout": 0.1, "lr": 0.01, "epochs": 4, "tokens_per_step": 256, "tokens_per_micro_batch": 128, "eval_every": 3,
        "save_every": 2, "keep_last": 99, "samples": 0, "schedule": "constant", "patience": 0,
    }  # fmt: skip
    return Config.of(values | more)


@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp32"])
def test_captured_eager_and_resumed_are_the_same_bits(compute, tiny_folder, tmp_path, deterministic):
    more = {"deterministic": True, "compute_dtype": compute}
    captured = train(settings(tiny_folder("llama"), tmp_path / "captured", **more), console=QUIET).folder
    end = read_events(captured / "metrics.jsonl")[-1]
    assert end["captures"] == 1 and end["peak_device_memory"] > 0 and end["host_ms"] > 0
    eager = train(settings(tiny_folder("llama"), tmp_path / "eager", graph=False, **more), console=QUIET).folder
    assert read_events(eager / "metrics.jsonl")[-1]["captures"] == 0
    assert figures(captured) == figures(eager) and adapter_bytes(captured) == adapter_bytes(eager)
    resumed = tmp_path / "resumed"
    shutil.copytree(captured, resumed)
    shutil.rmtree(resumed / "adapter")
    for step, path in checkpoint.steps(resumed / "checkpoints").items():
        if step > 4:
            shutil.rmtree(path)
    train(Config.load(resumed / "config.yaml"), console=QUIET, resume=str(resumed))
    assert figures(resumed) == figures(captured) and adapter_bytes(resumed) == adapter_bytes(captured)


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_the_gpus_run_follows_the_cpus(variant, tiny_folder, tmp_path):
    """fp32 on both sides and a small rate: what differs is the order of sums, and padding that must not count."""
    more = {"compute_dtype": "fp32", "dropout": 0.0, "lr": 1e-3}
    gpu = train(settings(tiny_folder(variant), tmp_path / "gpu", **more), console=QUIET).folder
    cpu = train(settings(tiny_folder(variant), tmp_path / "cpu", **more, device="cpu"), console=QUIET).folder
    for ours, theirs in zip(figures(gpu), figures(cpu), strict=True):
        assert ours[:2] == theirs[:2] and ours[4:] == theirs[4:]
        assert ours[2] == pytest.approx(theirs[2], rel=1e-3)


@pytest.mark.parametrize("recompute", ["selective", "full", "offload"])
def test_recomputing_changes_nothing(recompute, tiny_folder, tmp_path, deterministic):
    more = {"deterministic": True, "max_steps": 6}
    kept = train(settings(tiny_folder("llama"), tmp_path / "kept", **more), console=QUIET).folder
    again = train(settings(tiny_folder("llama"), tmp_path / "again", recompute=recompute, **more), console=QUIET).folder
    assert figures(kept) == figures(again) and adapter_bytes(kept) == adapter_bytes(again)


def test_steps_follow_each_other_without_a_wait(tiny_folder, tmp_path, monkeypatch):
    ranked.unwatched(monkeypatch.setattr)
    run = train(settings(tiny_folder("llama"), tmp_path / "run"), console=QUIET).folder
    logged = [e["step"] for e in read_events(run / "metrics.jsonl") if e["event"] == "step"]
    assert logged == list(range(1, len(logged) + 1)) and len(logged) > 10


def test_every_batch_has_the_shape_that_was_captured(tiny_folder, tmp_path, monkeypatch):
    made = []
    real = parts.pipeline_for
    monkeypatch.setattr(parts, "pipeline_for", lambda *args, **named: made.append(real(*args, **named)) or made[-1])
    train(settings(tiny_folder("llama"), tmp_path / "run"), console=QUIET)
    assert len(made[0].inputs) == 1 and made[0].captures == 1
