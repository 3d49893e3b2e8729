"""The ledger of reserved memory, which every user of a machine can write to: damaged as JSON, its checksum put right
again. Refused means put aside and said; and whatever was there, what the next process writes can be read.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from random import Random
from typing import Any

from graftune.cli.doctor import _reserved
from graftune.errors import GraftuneError
from graftune.ledger import Ledger, Memory, store
from graftune.training.reserve import described
from tests.fuzz import mutate
from tests.fuzz.judge import bad_message

FILE, DEVICE, ALL = "ledger.json", "GPU-0", Memory(100, 100)
HOLDS: dict[str, Any] = {
    "id": "1f", "group": "2e", "device": DEVICE, "planned": 60, "measured": 20, "task": "train llama", "user": "ada",
    "host": "node-1", "pid": 1, "began": "1", "namespace": "pid:[1]", "started": 1.7e9, "expires": 1e6, "ticket": 7,
    "granted": True,
}  # fmt: skip
WAITS = HOLDS | {"id": "3d", "group": "4c", "ticket": 8, "granted": False, "device": "host"}
BODY = {"version": 1, "next_ticket": 9, "settles": 12.5, "entries": [HOLDS, WAITS]}


def some_ledger(draw: Random) -> bytes:
    made = mutate.some_json(draw, BODY)
    return signed(made) if draw.random() < 0.9 else made


def signed(body: bytes) -> bytes:
    """With a checksum that is right, where there can be one."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(body)
        if isinstance(found, dict) and found:
            return b'{"crc32":%d,' % store._checksum(found) + body.strip()[1:]
    return body


def read_ledger(folder: Path) -> None:
    """As a run does that starts, and as `graftune doctor` shows it, whether or not who made an entry lives."""
    content, told = (folder / FILE).read_bytes(), list[str]()
    ledger = Ledger(folder / "shared", tell=told.append)
    ledger.store.folder.mkdir(exist_ok=True)
    for path in ledger.store.folder.iterdir():
        path.unlink()
    ledger.store.path.write_bytes(content)
    ledger.room(DEVICE, ALL)
    claim = ledger.claim(DEVICE, 60, task="fuzz")
    claim.take(ALL, queue=True)
    assert claim.entry in store.parsed(ledger.store.path.read_bytes()).entries
    claim.release()
    if told:
        raise GraftuneError(told[0])
    for entry in store.parsed(content).entries if content else []:
        entry.lives(0.0)
        report = {"devices": [], "ledger": {"reservations": [entry.document()]}}
        for text in (described(entry), " ".join(_reserved(report)[0])):
            fault = bad_message(text)
            assert not fault, f"{fault}: {text!r}"
