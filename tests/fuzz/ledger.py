"""The ledger of reserved memory, which every user of a machine can write to, damaged as JSON. A refused ledger is moved
aside with a warning; and the next process can read what this one writes.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from graftune.cli.doctor import _reserved
from graftune.errors import GraftuneError
from graftune.io.json_file import parse_json
from graftune.ledger import Ledger, Memory
from graftune.ledger.reservation import read_reservation
from graftune.training.reserve import described
from tests.fuzz import mutate
from tests.fuzz.judge import bad_message

FILE, DEVICE, ALL = "ledger.json", "GPU-0", Memory(100, 100)
HOLDS: dict[str, Any] = {
    "id": "1f", "group": "2e", "device": DEVICE, "planned": 60, "measured": 20, "task": "train llama", "user": "ada",
    "host": "node-1", "pid": 1, "process_start": "1", "machine": "node-1 pid:[1]", "started": 1.7e9, "expires": 1e6,
    "ticket": 7, "granted": True,
}  # fmt: skip
WAITS = HOLDS | {"id": "3d", "group": "4c", "ticket": 8, "granted": False, "device": "host"}


def some_ledger(draw: Random) -> bytes:
    return mutate.some_json(draw, [HOLDS, WAITS])


def read_ledger(folder: Path) -> None:
    """As a run does that starts, and as `graftune doctor` shows it, whether or not the processes are alive."""
    content, warnings = (folder / FILE).read_bytes(), list[str]()
    ledger = Ledger(folder / "shared", warn=warnings.append)
    ledger.folder.mkdir(exist_ok=True)
    for path in ledger.folder.iterdir():
        path.unlink()
    ledger.path.write_bytes(content)
    ledger.check()
    ledger.available(DEVICE, ALL)
    claim = ledger.claim(DEVICE, 60, task="fuzz")
    claim.take(ALL, queue=True)
    assert claim.reservation in ledger.reservations()
    claim.release()
    if warnings:
        raise GraftuneError(warnings[0])
    for one in map(read_reservation, parse_json(content)):
        one.is_alive(0.0)
        report = {"devices": [], "ledger": {"reservations": [one.document()]}}
        for text in (described(one), " ".join(_reserved(report)[0])):
            fault = bad_message(text)
            assert not fault, f"{fault}: {text!r}"
