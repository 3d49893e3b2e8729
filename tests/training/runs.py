"""Runs for the tests of resuming and of bad input: small data, settings that reach every path, and processes to kill.

A process per kill would cost its imports each time (3 s here), so one server imports graftune once and forks a child
for each command line. A forked child is a process like any other: kill -9 takes it away without a last word.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from tests.support.fork_server import Server

ROOT = Path(__file__).parents[2]
# Dropout, two micro-batches a step, evaluations and checkpoints at steps that do not coincide, an early stop.
SETTINGS = [
    *("--device", "cpu", "--threads", "1", "--rank", "4", "--dropout", "0.2", "--lr", "0.1", "--epochs", "6"),
    *("--tokens-per-step", "128", "--tokens-per-micro-batch", "64", "--eval-every", "3", "--save-every", "2"),
    *("--schedule", "constant", "--patience", "2", "--samples", "2", "--sample-tokens", "3"),
]


def write_data(path: Path, rows: int = 16, seed: int = 2) -> Path:
    """Prompt/response rows of unequal lengths, below 64 tokens of the byte tokenizer's ChatML."""
    draw = random.Random(seed)

    def text(shortest: int, longest: int) -> str:  # random letters: learnt by heart, so validation soon gets worse
        return "".join(draw.choices("abcdefgh", k=draw.randint(shortest, longest)))

    records = [{"prompt": text(1, 9), "response": text(2, 10)} for _ in range(rows)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def adapter_bytes(run: Path) -> bytes:
    return (run / "adapter" / "adapter_model.safetensors").read_bytes()


def logged_steps(run: Path) -> int:
    """The highest step in the log so far, read while another process writes it."""
    try:
        text = (run / "metrics.jsonl").read_bytes()
    except FileNotFoundError:
        return -1
    at = text.rfind(b'"event": "step"')
    if at < 0:
        return 0
    tail = text[at : at + 120]
    return int(tail.split(b'"step": ')[1].split(b",")[0]) if b'"step": ' in tail and b"epoch" in tail else 0


class Processes:
    """Children that run `graftune ...`, one at a time. `die_at=(place, n)`: SIGKILL itself at the n-th call there.
    `draws`: loss.png too, which takes as long as all the rest."""

    slow = False

    def __init__(self, draws: bool = False) -> None:
        self.server = Server(Path(__file__).with_name("fork_server.py"), *(["draws"] if draws else []))
        self.close = self.server.close

    def start(
        self,
        *line: str,
        die_at: tuple[str, int] | None = None,
        log: Path,
        here: bool = False,
        environment: dict[str, str] | None = None,
    ) -> int:
        """`here`: in the server itself, so that its children have what it imported and rehearsed. `environment`: what a
        child has beside the server's."""
        request = {"line": list(map(str, line)), "die_at": die_at, "log": str(log), "here": here}
        request |= {"environment": environment or {}}
        return int(self.server.send(request)["pid"])

    def wait(self) -> int:
        """Exit code, or minus the signal that ended it."""
        return int(self.server.receive()["code"])

    def run(self, *line: str, die_at: tuple[str, int] | None = None, log: Path, here: bool = False) -> int:
        self.start(*line, die_at=die_at, log=log, here=here)
        return self.wait()


def wait_for_step(run: Path, step: int, pid: int) -> None:
    """Until the log shows the step, or the process is gone."""
    limit = time.monotonic() + 60
    while logged_steps(run) < step and time.monotonic() < limit and not _is_over(pid):
        time.sleep(0.003)


def _is_over(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
