"""A long run: does anything grow? `make soak`, or python -m tests.soak.soak_long [--device cuda] [--steps N].

One run of a tiny model with all that a run does besides stepping: evaluations and checkpoints at the end of every
epoch, checkpoints between, sample answers. Every so many steps the process is measured: resident memory, open handles,
threads, Python objects; on a GPU allocated and reserved memory; and the run folder by kind of file. After the first
fifth of the run (libraries load, caches fill) nothing but metrics.jsonl, which has a line a step by design, may grow.
`make test` has 400 steps of it (tests/training/test_long.py).
"""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graftune.api import train
from graftune.observe.console import Console
from graftune.observe.events import Event
from graftune.settings.config import Config
from tests.soak import runner

LOG = "metrics.jsonl"
WARM = 0.2  # share of the run before the first measurement that counts
RESIDENT_LIMIT = 24 << 20  # bytes that resident memory may differ by from one end of the rest to the other


class Measured(NamedTuple):
    step: int
    resident: int  # bytes
    handles: int
    threads: int
    objects: int
    device: int  # bytes allocated on the GPU
    reserved: int
    log: int  # bytes of metrics.jsonl
    checkpoints: int  # bytes of them all
    rest: int  # bytes of everything else in the folder


def measure(step: int, folder: Path) -> Measured:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    sizes = Counter[str]()
    for path in folder.rglob("*"):
        if path.is_file():
            kind = path.relative_to(folder).parts[0]
            sizes[kind if kind in (LOG, "checkpoints") else "rest"] += path.stat().st_size
    gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return Measured(
        step,
        pages * os.sysconf("SC_PAGESIZE"),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        len(gc.get_objects()) if gc.collect() >= 0 else 0,
        torch.cuda.memory_allocated() if gpu else 0,
        torch.cuda.memory_reserved() if gpu else 0,
        sizes[LOG],
        sizes["checkpoints"],
        sizes["rest"],
    )


def write_data(path: Path, rows: int) -> Path:
    """One example a step: rows of 20 to 40 tokens of the byte tokenizer's ChatML."""
    draw = random.Random(7)

    def text(count: int) -> str:
        return "".join(draw.choices("abcdefgh", k=count))

    records = [{"prompt": text(draw.randint(1, 6)), "response": text(draw.randint(2, 8))} for _ in range(rows)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(base: Path, work: Path, steps: int, device: str, *, rows: int, points: int = 100) -> list[Measured]:
    """The measurements of one run of so many steps."""
    folder, every = work / "run", max(1, steps // points)
    found = list[tuple[int, ...]]()  # plain ones, which are no objects to the garbage collector

    def look(event: Event) -> None:
        if event["event"] == "step" and event["step"] % every == 0:
            found.append(tuple(measure(event["step"], folder)))

    config: dict[str, Any] = {
        "base": str(base), "data": str(write_data(work / "data.jsonl", rows)), "out": str(folder), "device": device,
        "compute_dtype": "fp32" if device == "cpu" else "bf16", "rank": 4, "targets": ["qv"], "threads": 1,
        "tokens_per_step": 48, "tokens_per_micro_batch": 48, "epochs": 10_000.0, "max_steps": steps, "patience": 0,
        "eval_examples": 4, "val_split": 0.05, "save_every": max(1, rows // 2), "samples": 1, "sample_tokens": 2,
        "sample_every": max(1, steps // 10), "max_seq_len": 48, "schedule": "constant", "lr": 1e-4,
    }  # fmt: skip
    config["epochs"] = float(steps // (rows // 2) + 1)
    result = train(Config.of(config), console=Console(quiet=True), callbacks=[look])
    assert result.steps == steps and result.stopped == "finished", result
    return [Measured(*one) for one in found]


def slope(found: list[Measured], name: str) -> float:
    """Least squares over what is behind the warm-up, per 1,000 steps."""
    xs, ys = torch.tensor([(m.step, getattr(m, name)) for m in found], dtype=torch.float64).unbind(1)
    xs = (xs - xs.mean()) / 1000
    return float((xs * (ys - ys.mean())).sum() / xs.square().sum())


def after_warm_up(found: list[Measured]) -> list[Measured]:
    return [m for m in found if m.step > WARM * found[-1].step]


def grown(found: list[Measured], resident_limit: int = RESIDENT_LIMIT) -> list[str]:
    """What grew, in words; nothing: all is well."""
    rest, said = after_warm_up(found), []
    quarter = max(1, len(rest) // 4)
    first, last = rest[:quarter], rest[-quarter:]
    for name, limit in (
        ("resident", resident_limit), ("handles", 0), ("threads", 0), ("objects", 200), ("device", 0),
        ("reserved", 0), ("checkpoints", 64 << 10), ("rest", 256 << 10),
    ):  # fmt: skip
        # The least of each end: a picture that is being plotted or a sample that is being asked for is no growth.
        before, after = min(getattr(m, name) for m in first), min(getattr(m, name) for m in last)
        if after > before + limit:
            said.append(f"{name} grew from {before} to {after} ({slope(rest, name):+.1f} per 1,000 steps)")
    per_step = (last[-1].log - first[0].log) / (last[-1].step - first[0].step)
    if per_step > 600:
        said.append(f"{LOG} grows by {per_step:.0f} bytes a step")
    return said


def soak(work: Path, device: str = "cpu", steps: int = 0, family: str = "") -> bool:
    """10^5 steps of llama-shallow on a CPU, 10^4 of llama on a GPU, unless others are given."""
    from tests.support import tiny

    steps = steps or (100_000 if device == "cpu" else 10_000)
    base = tiny.make_folder(family or ("llama-shallow" if device == "cpu" else "llama"), work / "base")
    gc.collect()
    gc.freeze()  # what transformers and torch have made is not counted again at every look
    began = time.monotonic()
    found = run(base, work, steps, device, rows=max(100, steps // 50))
    gc.unfreeze()
    print(f"soak_long on {device}, torch {torch.__version__}, {time.monotonic() - began:.0f} s", flush=True)
    print("", after_warm_up(found)[0], found[-1], *(grown(found) or ["nothing grew"]), sep="\n  ")
    return not grown(found)


if __name__ == "__main__":
    runner.run(soak)
