"""Shared by the servers that fork processes for tests (tests/training/fork_server.py, tests/dist/fork_ranks.py), for
both ends of their pipes. A server imports torch once, and its children have it, which saves seconds each."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def prepare(*modules: str, draws: bool = False) -> None:
    """Import what every child needs."""
    import torch
    import torch.fx.experimental.symbolic_shapes  # the first backward of a process imports it; here it is shared

    from graftune.observe import plot
    from tests.support import assembled_once, rehearsed_once

    for name in ("graftune.api", "graftune.cli.app", *modules):
        importlib.import_module(name)
    rehearsed_once.install()
    assembled_once.install()
    if not draws:
        plot.loss_plot = lambda *_: None  # a second of every run, and nothing that most tests look at
    torch.set_num_threads(1)


def write_output_to(path: str, flags: int) -> None:
    """Send stdout and stderr of this process to a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def here(run: Callable[[], int]) -> int:
    """Run something in the server itself and restore its output. Later children have what it imported."""
    kept = [os.dup(number) for number in (1, 2)]
    try:
        return run()
    finally:
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        gc.collect()
        gc.freeze()  # a run begins by looking through all that is alive, and children need not look through this


class Server:
    """The process that forks, from the side of the tests: one JSON line for each request and answer."""

    def __init__(self, script: Path, *words: str, **environment: str):
        own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        command = [sys.executable, str(script), *words]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, **own, **environment}, **pipes)

    def send(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.receive()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
