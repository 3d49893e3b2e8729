"""Processes that race for a device of 100 units, 60 each, and writers of the ledger that are killed at random moments:
`python -m tests.support.ledger_race FOLDER ROUNDS N KILLS`.

Every round's processes are new ones, forked from this small one (no torch), that all ask at once. Whoever is granted
the memory says so in memory that all of them share, where they are counted; then it gives the memory back or, every
other round, is killed. Prints one JSON document.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
from collections import Counter

from graftune.ledger import Ledger, Memory

TOTAL, SIZE = 100, 60


def race(folder: str, rounds: int, processes: int) -> dict[str, object]:
    assert "torch" not in sys.modules, "the ledger is there without torch"
    granted, began = Counter[int](), time.monotonic()
    for number in range(rounds):
        granted[one_round(folder, processes, killed=number % 2 == 1)] += 1
    left = len(Ledger(folder).reservations())
    seconds = round(time.monotonic() - began, 1)
    return {"rounds": rounds, "processes": processes, "granted": dict(granted), "left": left, "seconds": seconds}


def one_round(folder: str, processes: int, *, killed: bool) -> int:
    """How many were granted the memory at the same time."""
    flags, (go, start), (over, end), (done, say) = mmap.mmap(-1, processes), os.pipe(), os.pipe(), os.pipe()
    children = []
    for number in range(processes):
        child = os.fork()
        if not child:
            code = 1
            try:
                os.close(start), os.close(end)
                os.read(go, 1)  # until the parent closes its end: all at once
                claim = Ledger(folder).claim("GPU-0", SIZE, task="race")
                claim.take(Memory(TOTAL, TOTAL))
                flags[number] = claim.granted
                os.write(say, b"x")
                os.read(over, 1)
                claim.release()
                code = 0
            finally:
                if code:
                    os.write(say, b"x")  # or the parent would wait for it
                os._exit(code)
        children.append(child)
    os.close(start)
    for _ in children:
        os.read(done, 1)
    holders = [child for child, flag in zip(children, flags[:], strict=True) if flag]
    for child in holders if killed else ():
        os.kill(child, signal.SIGKILL)
    os.close(end)
    codes = {child: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
    for handle in (go, over, done, say):
        os.close(handle)
    flags.close()
    failed = [child for child, code in codes.items() if code and not (killed and child in holders)]
    assert not failed, f"{len(failed)} processes failed"
    return len(holders)


def kills(folder: str, count: int) -> list[str]:
    """Writers killed at random moments: what is said of the ledger afterwards, which should be nothing."""
    said, draw, total = list[str](), random.Random(1), Memory(TOTAL, TOTAL)
    ledger = Ledger(folder, warn=said.append)
    for _ in range(count):
        child = os.fork()
        while not child:
            claim = Ledger(folder).claim("GPU-0", SIZE, task="x" * draw.randint(1, 90))
            claim.take(total)
            claim.renew(draw.randint(0, SIZE))
            claim.release()
        time.sleep(draw.uniform(0.0005, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        claim = ledger.claim("GPU-0", TOTAL - 5, task="all of it")
        claim.take(total)
        if not claim.granted:
            said.append("what a dead process held is not free")
        claim.release()
    return said


if __name__ == "__main__":
    folder, rounds, processes, count = sys.argv[1], *map(int, sys.argv[2:])
    print(json.dumps(race(folder, rounds, processes) | {"faults": kills(folder, count)}))
