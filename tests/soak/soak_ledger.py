"""The ledger of reserved memory at length: `make soak`, or python -m tests.soak.soak_ledger [--rounds 1000].

Three judges, none of which asks the ledger: how many processes of a race say that they were granted 60 of 100 units at
the same time; in which order those of a queue wrote their names into a log; and whether a ledger whose writers are
killed at random moments is ever damaged or keeps what they held. `make test` has 20 rounds (tests/test_ledger.py).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from graftune.ledger import Ledger, Memory
from graftune.ledger import ledger as ledger_file
from tests.soak.runner import run
from tests.support.ledger_race import race

ALL = Memory(100, 100)


def queue(folder: str, processes: int) -> tuple[list[int], list[int]]:
    """Processes that come one after the other and wait, every fifth of them killed as it waits: who should be served,
    in this order, and who was."""
    ledger_file.FIRST_WAIT = ledger_file.LONGEST_WAIT = 0.05
    log, children = Path(folder) / "served", []
    log.unlink(missing_ok=True)
    held = Ledger(folder).claim("GPU-0", 60, task="first")
    held.take(ALL)
    assert held.granted
    for number in range(processes):
        child = os.fork()
        if not child:
            code = 1
            try:
                claim = Ledger(folder).claim("GPU-0", random.Random(number).randint(45, 90), task=f"number {number}")
                claim.wait(lambda: ALL, 600)
                handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.write(handle, f"{number}\n".encode())
                claim.release()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
        limit = time.monotonic() + 60
        while not any(one.pid == child for one in Ledger(folder).reservations()):
            assert time.monotonic() < limit, f"number {number} did not come to its place"
            time.sleep(0.001)
    killed = children[::5]
    for child in killed:
        os.kill(child, signal.SIGKILL)
    held.release()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert [code for code, child in zip(codes, children, strict=True) if child not in killed and code] == []
    served = [int(line) for line in log.read_text().split()]
    return [number for number, child in enumerate(children) if child not in killed], served


def kills(folder: str, count: int) -> list[str]:
    """Writers killed at random moments. What was said of the ledger, which should be nothing."""
    said: list[str] = []
    ledger = Ledger(folder, warn=said.append)
    draw = random.Random(1)
    for _ in range(count):
        child = os.fork()
        if not child:
            while True:
                claim = Ledger(folder).claim("GPU-0", 60, task="x" * draw.randint(1, 90))
                claim.take(ALL)
                claim.renew(draw.randint(0, 60))
                claim.release()
        time.sleep(draw.uniform(0.0005, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        claim = ledger.claim("GPU-0", 95, task="all of it")
        claim.take(ALL)
        if not claim.granted:
            said.append("what a dead process held is not free")
        claim.release()
    return said


def soak(root: Path, rounds: int = 1000, processes: int = 32, queues: int = 20, count: int = 2000) -> bool:
    assert "torch" not in sys.modules
    folders = [root / name for name in ("race", "queue", "kills")]
    for folder in folders:
        folder.mkdir()
    found = race(str(folders[0]), rounds, processes)
    print(f"race: {found}", flush=True)
    orders = [queue(str(folders[1]), processes) for _ in range(queues)]
    wrong = sum(should != served for should, served in orders)
    print(f"queue: {queues} queues of {processes}, {wrong} served in another order", flush=True)
    said = kills(str(folders[2]), count)
    print(f"kills: {count} writers killed, {len(said)} faults {said[:3]}", flush=True)
    return found["granted"] == {1: rounds} and found["left"] == 0 and not wrong and not said


if __name__ == "__main__":
    run(soak)
