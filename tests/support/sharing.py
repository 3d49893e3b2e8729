"""Two runs share a device within their plans, a third waits, then runs: `python -m tests.support.sharing DEVICE BASE
FOLDER`, on cpu or cuda. Prints one JSON document; tests/training/test_reserve.py and tests/gpu/test_ledger.py read it.

graftune is imported once; each run is forked from here before anything touches CUDA. The first two stop after their
first step, with all of their memory, until the third stands in the queue: `memory_share` lets two of them in.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graftune import api
from graftune.ledger import Reservation, shared_ledger
from graftune.ledger import ledger as ledger_file
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.settings.config import Config
from tests.support import fork_server
from tests.training.runs import write_data

PATIENCE = 300.0


def share(device: str, base: str, folder: Path) -> dict[str, Any]:
    os.environ["GRAFTUNE_LEDGER"] = str(folder / "ledger")
    ledger_file.HEARTBEAT = 0.2
    fork_server.prepare()
    data, go = write_data(folder / "data.jsonl"), folder / "go"
    children = {}

    def start(number: int, **more: Any) -> None:
        settings = {
            **{"base": base, "data": str(data), "out": str(folder / str(number)), "device": device, "threads": 1},
            **{"rank": 4, "epochs": 1, "tokens_per_step": 128, "tokens_per_micro_batch": 64, "samples": 0},
            "deterministic": True,
        }
        config = Config.of(settings | more)
        children[number] = _forked(lambda: _run(config, go if number < 3 else None, folder / f"{number}.log"))

    start(1)
    first = _until(lambda: [e for e in _entries() if e.granted and e.measured])[0]
    total = _asked(device)
    more = {"memory_share": 2.5 * first.planned / total, "wait_gpu": PATIENCE}
    start(2, **more)
    _until(lambda: len([e for e in _entries() if e.granted and e.measured]) == 2)
    start(3, **more)
    shared = _until(lambda: found if len(found := _entries()) == 3 and not found[-1].granted else None)
    time.sleep(3 * ledger_file.HEARTBEAT)  # the third has tried again, the first two have measured
    shared = _entries()
    waited = not (folder / "3").exists()
    go.touch()
    codes = {number: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for number, child in children.items()}
    return {
        "total": total,
        "entries": [entry.document() for entry in shared],
        "waited": waited,
        "codes": codes,
        "left": len(_entries()),
        "runs": {number: _times(folder / str(number)) for number in children},
        "logs": {number: (folder / f"{number}.log").read_text() for number in children},
    }


def _run(config: Config, go: Path | None, log: Path) -> None:
    def hold(event: dict[str, Any]) -> None:
        if go is not None and event["event"] == "step":
            _until(go.exists)

    with log.open("w") as file:
        api.train(config, console=Console(stdout=file, stderr=file), callbacks=(hold,))


def _times(run: Path) -> dict[str, Any]:
    events = read_events(run / "metrics.jsonl")
    ends = {event["event"]: event["time"] for event in events if event["event"] in ("run_start", "run_end")}
    steps = [event["loss"] for event in events if event["event"] == "step"]
    plan = json.loads((run / "plan.json").read_text())
    end = next(event for event in events if event["event"] == "run_end")
    peak = end.get("peak_device_memory")
    return {**ends, "losses": steps, "needed": plan["needed"], "peak_device_memory": peak}


def _entries() -> list[Reservation]:
    ledger = shared_ledger()
    assert ledger is not None
    return sorted(ledger.reservations(), key=lambda entry: not entry.granted)


def _asked(device: str) -> int:
    """The device's memory, in a process of its own: this one must not touch CUDA."""
    out, into = os.pipe()

    def tell() -> None:
        from graftune.observe.memory import device_bytes

        os.write(into, str(device_bytes(device).total).encode())

    child = _forked(tell)
    os.waitpid(child, 0)
    return int(os.read(out, 100))


def _forked(work: Callable[[], object]) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def _until(found: Callable[[], Any]) -> Any:
    limit = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.1)
    return value


if __name__ == "__main__":
    print(json.dumps(share(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
