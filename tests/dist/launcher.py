"""Ranks as real processes over gloo on the CPU, forked by a server that has imported graftune once (fork_ranks.py)."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from graftune.observe.events import evals, read_events, steps
from tests.support.fork_server import Server


@dataclass
class Ended:
    codes: list[int]
    seconds: list[float]
    said: list[str]  # by rank

    @property
    def sentences(self) -> list[str]:
        """What was told as the reason of an end, by all ranks together."""
        return [line for text in self.said for line in text.splitlines() if line.startswith("graftune: ")]


class Launcher:
    def __init__(self, root: Path):
        self.root, self.count = root, 0
        self.server = Server(Path(__file__).with_name("fork_ranks.py"))
        self.close = self.server.close

    def start(self, size: int, *line: Any, **more: Any) -> list[int]:
        """`size` ranks, or with 0 one process that no launcher has started; their process numbers. `restarts`: under
        torchrun's agent, whose number it is then."""
        self.count += 1
        self.size, self.log = max(1, size), self.root / f"log-{self.count}"
        request = {"size": size, "line": list(map(str, line)), "log": str(self.log), "port": free_port(), **more}
        return list(self.server.send(request)["pids"])

    def wait(self) -> Ended:
        ends = self.server.receive()["ends"]
        return Ended([end[0] for end in ends], [end[1] for end in ends], [self.said(r) for r in range(self.size)])

    def run(self, size: int, *line: Any, **more: Any) -> Ended:
        self.start(size, *line, **more)
        return self.wait()

    def said(self, rank: int) -> str:
        path = Path(f"{self.log}-{rank}")
        return path.read_text() if path.exists() else ""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in steps(read_events(run / "metrics.jsonl"))]


def validation(run: Path) -> list[float]:
    return [event["loss"] for event in evals(read_events(run / "metrics.jsonl"))]


def trained(run: Path) -> dict[str, torch.Tensor]:
    """What a run left: its adapter's tensors, or its model's."""
    adapter = run / "adapter" / "adapter_model.safetensors"
    if adapter.exists():
        return load_file(adapter)
    return {name: value for file in (run / "model").glob("*.safetensors") for name, value in load_file(file).items()}


def apart(left: Path, right: Path) -> float:
    """The largest difference of any tensor that two runs left, relative to its norm."""
    one, other = trained(left), trained(right)
    assert one.keys() == other.keys() and one
    return max(float((one[n].float() - other[n].float()).norm() / (one[n].float().norm() + 1e-12)) for n in one)


def wait_for(found: Any, seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.01)
