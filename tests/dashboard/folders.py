"""Run folders written by hand, as a run leaves them, and the page's server over them without a socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from graftune.dashboard.runs import open_runs
from graftune.dashboard.server import application
from graftune.io.lock import FolderLock
from graftune.settings.config import Config


def step(number: int, **more: Any) -> dict[str, Any]:
    figures = {"loss": 4.0 / number, "grad_norm": 1.0, "lr": 1e-4, "tokens": 128, "tok_s": 1000.0, "skipped": False}
    return {"event": "step", "time": 1000.0 + number, "step": number, **figures, **more}


def start(steps: int = 100, **more: Any) -> dict[str, Any]:
    return {"event": "run_start", "time": 1000.0, "steps": steps, **more}


def end(step: int, stopped: str = "finished", **more: Any) -> dict[str, Any]:
    return {"event": "run_end", "time": 2000.0, "step": step, "stopped": stopped, **more}


def lines(*events: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def write_run(folder: Path, *events: dict[str, Any], **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_bytes(lines(*events))
    Config.of(settings).save(folder / "config.yaml")
    return folder


def append(folder: Path, *events: dict[str, Any]) -> None:
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(lines(*events))


@contextmanager
def trains(folder: Path) -> Iterator[None]:
    """While a process trains there, which has held the lock since before the folder's events."""
    with FolderLock(folder) as lock:
        held = json.loads(lock.path.read_bytes())
        lock.path.write_text(json.dumps(held | {"since": 0.0}))
        yield


def client(root: Path, host: str = "127.0.0.1", token: str = "", name: str = "localhost:8472") -> TestClient:
    app = application(open_runs(str(root)), host=host, token=token)
    return TestClient(app, base_url=f"http://{name}", raise_server_exceptions=True)
