"""Damaged files by the million: `python -m tests.soak.soak_fuzz --count 1130000 --jobs 14 --seconds 400`.

Every input is a function of (seed, format, number): `--only FORMAT --number N` makes and reads a single one again, and
`--keep FOLDER` writes it there. Each worker is a process that reads its inputs one after another in itself, with limits
on its CPU seconds, its resident set (judge.py) and its address space. It prints the name of each input before it reads
it, so that an input that ends the process is known; another process continues behind it.

Prints a table, and exits with 1 if any input failed. Needs no pytest.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.soak.runner import run

STUCK = 10  # CPU seconds after which a worker ends itself; 1 is a failure already
ADDRESSES = 3 << 30  # bytes of address space beyond what a worker has when it begins
BLOCK = 25  # inputs of a format before the next format's turn
COLUMNS = ("inputs", "refused", "accepted", "slowest_s", "peak_mib", "failures")


def turns(shares: dict[str, int], count: int, worker: int, jobs: int) -> Iterator[tuple[str, int]]:
    """(format, number) of a worker's inputs, a block of each format in turn."""
    counts = {name: count * share // sum(shares.values()) for name, share in shares.items()}
    for start in range(0, max(counts.values(), default=0), BLOCK * jobs):
        for name, most in counts.items():
            for number in range(start + worker, min(most, start + BLOCK * jobs), jobs):
                yield name, number


def formats_of(folder: Path, only: str, separate: bool = False) -> dict[str, Any]:
    """The formats by name. `separate`: tokenizers are examined in a process of their own, as the package does it."""
    import torch

    from graftune.tokenizer import examine
    from tests.fuzz import formats

    torch.set_num_threads(1)
    if not separate:
        examine.faults_of = formats.examined_here
    return {
        one.name: one for one in formats.all_formats(folder) if one.name in (only.split(",") if only else [one.name])
    }


def look(one: Any, seed: int, number: int, folder: Path) -> Any:
    from tests.fuzz import formats
    from tests.fuzz.judge import judged

    folder.mkdir(exist_ok=True, parents=True)
    signal.setitimer(signal.ITIMER_PROF, STUCK)
    size = formats.write(folder, one.made(random.Random(f"{seed}/{one.name}/{number}")))
    return judged(lambda: one.read(folder), size, one.factor)


def work(folder: Path, flags: dict[str, Any]) -> None:
    """One worker. Prints a JSON line before each input and one with its verdict."""
    known = formats_of(folder / "seeds", flags["only"])
    for one in known.values():  # imports and caches are not an input's
        for number in range(12):
            look(one, flags["seed"] + 1, number, folder / "input")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESSES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    shares = {name: one.share for name, one in known.items()}
    for place, (name, number) in enumerate(turns(shares, flags["count"], flags["worker"], flags["jobs"])):
        if place >= flags["skip"]:
            if time.time() > flags["until"]:
                break
            print(json.dumps([place, name, number]), flush=True)
            verdict = look(known[name], flags["seed"], number, folder / "input")
            found = [verdict.accepted, verdict.seconds, verdict.grown, verdict.fault, verdict.detail]
            print(json.dumps(found), flush=True)


def watch(flags: dict[str, Any], worker: int, rows: dict[str, Counter[str]], faults: list[Any]) -> None:
    """Runs a worker to its last input and counts what it says. One that dies is followed by another."""
    skip = 0
    while True:
        words = [f"--{name}={value}" for name, value in (flags | {"worker": worker, "skip": skip}).items()]
        with subprocess.Popen(
            [sys.executable, "-m", "tests.soak.soak_fuzz", *words], stdout=subprocess.PIPE
        ) as process:
            at: list[Any] = []
            for line in process.stdout or ():
                if len(found := json.loads(line)) == 3:
                    at, skip = found, found[0] + 1
                    continue
                add(rows[at[1]], *found[:4])
                if found[3]:
                    faults.append({"format": at[1], "number": at[2], "fault": found[3], "detail": found[4]})
                at = []
        if process.returncode == 0:
            return
        assert at, f"worker {worker} ended with {process.returncode} outside of an input"
        # Where a library ended it that the package keeps in a process of its own, the package is asked, too.
        one = [f"--only={at[1]}", f"--number={at[2]}", f"--seed={flags['seed']}", "--separate"]
        alone = subprocess.run([sys.executable, "-m", "tests.soak.soak_fuzz", *one], capture_output=True, timeout=600)
        fault = f"ended the process ({process.returncode})" if alone.returncode else ""
        add(rows[at[1]], False, 0.0, 0, fault)
        if fault:
            faults.append({"format": at[1], "number": at[2], "fault": fault, "detail": ""})


def add(row: Counter[str], accepted: bool, seconds: float, grown: int, fault: str) -> None:
    row.update({"inputs": 1, "failures": bool(fault), "accepted": accepted and not fault})
    row["refused"] = row["inputs"] - row["failures"] - row["accepted"]
    row["slowest_s"] = max(row["slowest_s"], round(seconds, 3))  # type: ignore[assignment]
    row["peak_mib"] = max(row["peak_mib"], round(grown / 2**20, 1))  # type: ignore[assignment]


def soak(
    folder: Path, count: int = 20_000, jobs: int = max(1, (os.cpu_count() or 2) - 1), seconds: float = 3600.0,
    seed: int = 1, only: str = "", number: int = -1, keep: str = "", separate: bool = False,
    worker: int = -1, skip: int = 0, until: float = 0.0,
) -> bool | None:  # fmt: skip
    flags = {"count": count, "jobs": jobs, "seed": seed, "only": only, "until": until or time.time() + seconds}
    if worker >= 0:
        return work(folder, flags | {"worker": worker, "skip": skip})
    known = formats_of(folder / "seeds", only, separate)
    if number >= 0:
        verdict = look(known[only], seed, number, Path(keep) if keep else folder / "input")
        print(verdict)
        return not verdict.fault
    began, faults, rows = time.time(), list[Any](), {name: Counter[str]() for name in known}
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda worker: watch(flags, worker, rows, faults), range(jobs)))
    print("format        " + "".join(f"{column:>10}" for column in COLUMNS))
    for name, row in rows.items():
        print(f"{name:14}" + "".join(f"{row[column]:10}" for column in COLUMNS))
    for fault in faults[:50]:
        print(f"  {fault['format']} {fault['number']}: {fault['fault'][:60]}  {fault['detail'][-160:]!r}")
    total, took = sum(row["inputs"] for row in rows.values()), round(time.time() - began, 1)
    print(f"{total} inputs in {took:.0f} s by {jobs} workers, {len(faults)} failures, seed {seed}")
    return not faults


if __name__ == "__main__":
    run(soak)
