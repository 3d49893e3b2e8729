"""Ranks on CUDA: one rank over NCCL does what a plain run does, captured and without a wait; two ranks that share a GPU
do it over gloo, between the graphs; and a step that never ends on the device is ended by the watch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from graftune.api import train
from graftune.observe.events import read_events
from tests.dist.launcher import free_port
from tests.gpu.test_run import QUIET, figures, settings
from tests.support.fork_server import ROOT
from tests.training.runs import adapter_bytes

pytestmark = pytest.mark.gpu


def started(size: int, values: dict[str, Any], folder: Path, *how: str) -> list[subprocess.Popen[str]]:
    path = folder / f"settings-{size}.json"
    path.write_text(json.dumps(values))
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    where |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.ranked", str(path), *how],
            env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    return [(process.wait(timeout=500), said) for process in processes for _, said in [process.communicate()]]


@pytest.fixture
def deterministic():
    yield
    torch.use_deterministic_algorithms(False)  # a run sets it for its process


def test_one_rank_over_nccl_is_a_plain_run(tiny_folder, tmp_path, deterministic):
    """The same bits, one capture, and no wait between steps."""
    plain = train(settings(tiny_folder("llama"), tmp_path / "plain", deterministic=True), console=QUIET).folder
    asked = settings(tiny_folder("llama"), tmp_path / "ranked", deterministic=True).flat()
    ((code, said),) = ended(started(1, asked, tmp_path, "unwatched"))
    assert code == 0 and "1 rank, gradients added up over nccl" in said, said
    ranked = tmp_path / "ranked"
    assert read_events(ranked / "metrics.jsonl")[-1]["captures"] == 1
    assert figures(ranked) == figures(plain) and adapter_bytes(ranked) == adapter_bytes(plain)


def test_two_ranks_share_a_gpu(tiny_folder, tmp_path):
    more = {"compute_dtype": "fp32", "lr": 1e-3, "device": "cuda:0"}
    plain = train(settings(tiny_folder("llama"), tmp_path / "plain", **more), console=QUIET).folder
    asked = settings(tiny_folder("llama"), tmp_path / "ranked", **more).flat()
    (code, said), other = ended(started(2, asked, tmp_path))
    assert code == 0 and other == (0, ""), (said, other)
    assert "gloo between the CUDA graphs" in said
    for ours, theirs in zip(figures(tmp_path / "ranked"), figures(plain), strict=True):
        assert ours[:2] == theirs[:2] and ours[4:] == theirs[4:]
        assert ours[2] == pytest.approx(theirs[2], rel=1e-5) and ours[3] == pytest.approx(theirs[3], rel=1e-3)


def test_a_step_that_never_ends_is_ended(tiny_folder, tmp_path):
    """The device waits on a flag that is never set: no collective's time limit sees that."""
    asked = settings(tiny_folder("llama"), tmp_path / "hung", deadline=5.0, eval_every=0, save_every=0, val_split=0.0)
    (process,) = started(1, asked.flat(), tmp_path, "hang")
    log, limit = tmp_path / "hung" / "metrics.jsonl", time.monotonic() + 300
    while (
        time.monotonic() < limit and process.poll() is None and (not log.exists() or '"step": 4' not in log.read_text())
    ):
        time.sleep(0.1)
    began = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and "graftune: step 5 has not finished within" in said, said
    assert time.monotonic() - began < 5 + 10
