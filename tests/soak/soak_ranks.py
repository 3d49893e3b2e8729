"""Several ranks, at length: `make soak`. Not part of `make test`, which has two ranks and one setting of each kind.

Fifty steps on 2 and 4 ranks against one, in every case of tests/dist/cases.py; a rank killed at ten random moments
under torchrun's own agent; a rank that is stopped; torchrun itself, from the command line. Figures are printed
(pytest -s).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from graftune.observe.events import read_events
from tests.dist import cases
from tests.dist.launcher import Launcher, free_port, losses, trained, wait_for
from tests.support.fork_server import ROOT

STEPS = 50


def shown(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


@pytest.fixture(scope="module")
def plenty(launcher: Launcher) -> Path:
    return cases.write_data(launcher.root / "plenty.jsonl", rows=150)


@pytest.mark.parametrize("case", cases.CASES)
def test_ranks_compute_what_one_does(launcher: Launcher, base: Path, plenty: Path, case: str) -> None:
    more = [*cases.CASES[case], "--epochs", "99", "--max-steps", str(STEPS), "--eval-every", "20"]
    one, data = launcher.root / f"{case} alone", cases.suited(case, plenty)
    cases.run(launcher, 0, *cases.line(base, data, one, *more))
    for size in (2, 4):
        out = launcher.root / f"{case} on {size}"
        cases.run(launcher, size, *cases.line(base, data, out, *more))
        first, later, weights = cases.compare(one, out, STEPS)
        shown(f"{case}, {size} ranks: loss off by {first:.1e} at step 1, {later:.1e} in {STEPS}, weights {weights:.1e}")


def test_ten_kills_under_torchruns_agent(launcher: Launcher, base: Path, plenty: Path) -> None:
    """A random rank of two at a random moment; the agent starts both again, and the adapter is the undisturbed one."""
    draw = random.Random(20261117)
    more = [*cases.LORA, "--dropout", "0.2", "--epochs", "99", "--max-steps", "30", "--save-every", "3"]
    more += ["--deadline", "10"]
    straight = launcher.root / "undisturbed 30"
    cases.run(launcher, 0, *cases.line(base, plenty, launcher.root / "alone 30", *more))
    cases.run(launcher, 2, *cases.line(base, plenty, straight, *more))
    for attempt in range(10):
        out, rank = launcher.root / f"attempt {attempt}", draw.randrange(2)
        step = draw.randint(1, 29)
        kill = {str(rank): ["kill", step]}
        began = time.monotonic()
        ended = launcher.run(2, *cases.line(base, plenty, out, *more), misbehave=kill, restarts=1)
        assert ended.codes == [0], ended.said
        resumed = [event["step"] for event in read_events(out / "metrics.jsonl") if event["event"] == "resume"]
        one, other = trained(out), trained(straight)
        assert all(one[name].equal(other[name]) for name in other) and losses(out) == losses(straight)
        seconds = time.monotonic() - began
        shown(
            f"kill {attempt}: rank {rank} at step {step}, resumed at {resumed}, the same adapter after {seconds:.0f} s"
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named(launcher: Launcher, base: Path, plenty: Path, rank: int) -> None:
    more = [*cases.LORA, "--epochs", "99", "--max-steps", "30", "--deadline", "5"]
    line = cases.line(base, plenty, launcher.root / f"stopped {rank}", *more)
    began = time.monotonic()
    pids = launcher.start(2, *line, misbehave={str(rank): ["stop", 7]})
    try:
        wait_for(lambda: "graftune: " in launcher.said(1 - rank))
        seconds = time.monotonic() - began
    finally:
        os.kill(pids[rank], signal.SIGKILL)
        ended = launcher.wait()
    assert ended.codes[1 - rank] == 1 and f"rank {rank} has not" in "".join(ended.sentences), ended
    shown(f"rank {rank} stopped at step 7: the other ended {seconds:.0f} s after its start: {ended.sentences[0]}")


def test_torchrun_from_the_command_line(base: Path, plenty: Path, tmp_path: Path) -> None:
    line = cases.line(base, plenty, tmp_path / "run", *cases.LORA, "--epochs", "99", "--max-steps", "5")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "graftune", *line]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, gradients added up over gloo" in done.stderr and len(losses(tmp_path / "run")) == 5
    wrong = [*command, "--max-seq-len", "4"]
    done = subprocess.run(wrong, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "--max-seq-len is 4" in done.stderr


def test_two_nodes_restart_together(base: Path, plenty: Path, tmp_path: Path) -> None:
    """Two agents, as on two machines; the agent whose worker was not killed counts no restart."""
    line = cases.line(base, plenty, tmp_path / "run", *cases.LORA, "--epochs", "99", "--max-steps", "60")
    line += ["--save-every", "2", "--deadline", "10"]
    how = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-backend", "c10d"]
    how += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "soak"]
    command = [sys.executable, "-m", "torch.distributed.run", *how, "-m", "graftune", *line]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    agents = [subprocess.Popen(command, env=environment) for _ in range(2)]
    wait_for(lambda: (tmp_path / "run" / "checkpoints" / "step-4").exists(), 120)
    os.kill(worker_of(1, tmp_path / "run"), signal.SIGKILL)
    assert [agent.wait(timeout=200) for agent in agents] == [0, 0]
    events = read_events(tmp_path / "run" / "metrics.jsonl")
    resumed = [event["step"] for event in events if event["event"] == "resume"]
    assert len(resumed) == 1 and len(losses(tmp_path / "run")) == 60
    shown(f"two nodes, a worker killed: resumed at {resumed}, finished with one restart")


def worker_of(rank: int, run: Path) -> int:
    """The process of this rank, by its environment."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            told = (process / "environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in told and str(run).encode() in (process / "cmdline").read_bytes():
                return int(process.name)
    raise AssertionError(f"there is no rank {rank}")
