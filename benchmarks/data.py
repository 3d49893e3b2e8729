"""How much CPU, memory and time the encoding of a large data set takes, and how soon it is found again.

    python benchmarks/data.py [--rows 1000000] [--long 200000] [--base BASE] [--json FILE]

Two files of chat rows are made from a seed: `one-turn` (a question and an answer) and `six-turn` (three of each). Each
is measured in processes of its own, one after the other:

- `reference`: every line parsed, every conversation rendered once by Jinja without a sandbox, and all texts encoded by
  the `tokenizers` library in batches. No mask, no check, nothing kept. `parse_s` is apart: only rendering and encoding
  count for `ratio`, which is the CPU time of ours over that (`ratio_with_parsing` has it on both sides).
- `first`: `graftune.data.prepare`, reading and checking included, into an empty cache.
- `second`: the same again in a new process: `ready_s` is the time from settings read to data ready and split, with the
  base's tokenizer opened before (`open_s`).

CPU time is that of all threads. `peak_mib` is the most anonymous memory beyond the idle process, after everything is
imported and the tokenizer is open: pages of mapped files are the operating system's to keep or drop.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import measure

BATCH = 1024
TEXT = """
the answer question weather model value number table river mountain garden window paper letter music history
science reason method result example because although however without between another several important possible
write read count compare explain describe translate shorten improve find make give take keep show tell think is
are was were has have can could should would may of in on at by for with from to and or but not this that these
Paris London Tokyo Monday January 2024 17 3.5 100% function return class list string error file folder
"""
WORDS = TEXT.split()


def make(path: Path, rows: int, turns: int, seed: int) -> None:
    """So many conversations of that many turns: questions of 8 to 40 words, answers of 20 to 90."""
    rng = random.Random(seed)
    shapes = {"user": (8, 40), "assistant": (20, 90)}
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            messages = []
            for turn in range(turns):
                role = ("user", "assistant")[turn % 2]
                text = " ".join(rng.choices(WORDS, k=rng.randint(*shapes[role])))
                messages.append({"role": role, "content": text[0].upper() + text[1:] + ".?"[role == "user"]})
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


class Peak:
    """The most anonymous memory of this process from here on, in MiB beyond what it had."""

    def __init__(self) -> None:
        self.idle = self.most = self._now()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _now(self) -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) // 1024

    def _watch(self) -> None:
        while not self.done.wait(0.02):
            self.most = max(self.most, self._now())

    def end(self) -> int:
        self.done.set()
        self.thread.join()
        return max(self.most, self._now()) - self.idle


@contextmanager
def measured(into: dict[str, Any], name: str) -> Iterator[None]:
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    into[f"{name}_cpu_s"] = round(time.process_time() - cpu, 3)
    into[f"{name}_s"] = round(time.perf_counter() - wall, 3)


def reference(path: str, tokenizer: Any) -> dict[str, Any]:
    import jinja2
    import jinja2.ext

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    template = environment.from_string(tokenizer.template.source)
    fixed = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or ""}
    found = {"parse_cpu_s": 0.0, "render_cpu_s": 0.0, "encode_cpu_s": 0.0}
    tokens, batch, texts = 0, [], []
    peak = Peak()
    started = time.perf_counter()

    def take() -> int:
        marks = [time.process_time()]
        rows = [json.loads(line) for line in batch]
        marks.append(time.process_time())
        texts[:] = [template.render(messages=row["messages"], tools=None, **fixed) for row in rows]
        marks.append(time.process_time())
        count = sum(map(len, tokenizer.backend.encode_batch(texts, add_special_tokens=False)))
        marks.append(time.process_time())
        for name, first, last in zip(found, marks, marks[1:], strict=False):
            found[name] += last - first
        batch.clear()
        return count

    with open(path, "rb") as file:
        for line in file:
            batch.append(line)
            if len(batch) == BATCH:
                tokens += take()
        tokens += take() if batch else 0
    return found | {"tokens": tokens, "wall_s": time.perf_counter() - started, "peak_mib": peak.end()}


def ours(path: str, tokenizer: Any) -> dict[str, Any]:
    from graftune.data.dataset import prepare, split
    from graftune.settings.sections import DataConfig

    peak, found = Peak(), dict[str, Any]()
    with measured(found, "ready"):
        data = prepare(path, tokenizer, DataConfig())
        training, validation = split(data, 0.2, 42)
    found |= {"peak_mib": peak.end(), "tokens": data.summary.tokens, "examples": len(data)}
    return found | {"identity": hashlib.sha256((training.digest + validation.digest).encode()).hexdigest()[:16]}


def worker(what: str, path: str, base: str) -> dict[str, Any]:
    import graftune.data.dataset  # noqa: F401 (an idle process has everything imported)
    from graftune.settings.config import Config
    from graftune.weights.base import open_base

    found: dict[str, Any] = {}
    with measured(found, "open"):
        tokenizer = open_base(base or Config().base.base, Config().base.revision).tokenizer
    return found | (reference if what == "reference" else ours)(path, tokenizer)


def apart(what: str, path: str, base: str, cache: str) -> dict[str, Any]:
    """In a process of its own."""
    command = [sys.executable, __file__, "--worker", what, "--data", path, "--base", base]
    done = subprocess.run(command, env={**os.environ, "GRAFTUNE_CACHE": cache}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def case(path: Path, base: str, cache: str) -> dict[str, Any]:
    found: dict[str, Any] = {"bytes": path.stat().st_size}
    for name in ("reference", "first", "second"):
        found[name] = apart(name, str(path), base, cache)
    plain, first = found["reference"], found["first"]
    if first["identity"] != found["second"]["identity"]:
        raise SystemExit("the second start found other tokens than the first one made")
    counted = plain["render_cpu_s"] + plain["encode_cpu_s"]
    found["ratio"] = round(first["ready_cpu_s"] / counted, 3)
    found["ratio_with_parsing"] = round(first["ready_cpu_s"] / (counted + plain["parse_cpu_s"]), 3)
    found["tokens_per_s"] = round(first["tokens"] / first["ready_s"])
    found["cache_mib"] = sum(file.stat().st_size for file in Path(cache, "data").iterdir()) >> 20
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="one-turn rows")
    parser.add_argument("--long", type=int, default=200_000, help="six-turn rows")
    parser.add_argument("--base", default="", help="whose tokenizer and template; empty: the default base's")
    parser.add_argument("--json", default="", help="a machine's record, or - to print")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.worker:
        print(json.dumps(worker(args.worker, args.data, args.base)))
        return 0
    record: dict[str, Any] = {"cores": os.cpu_count(), "machine": platform.processor() or platform.machine()}
    record |= measure.facts()
    for name, rows, turns in (("one-turn", args.rows, 2), ("six-turn", args.long, 6)):
        if not rows:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "rows.jsonl")
            make(path, rows, turns, seed=7)
            found = record[name] = {"rows": rows} | case(path, args.base, str(Path(folder, "cache")))
        print(
            f"{name}: {rows} rows, {found['first']['tokens']} tokens, {found['tokens_per_s']} tokens/s; CPU "
            f"{found['first']['ready_cpu_s']:.1f} s, {found['ratio']:.2f}x rendering once and encoding "
            f"({found['ratio_with_parsing']:.2f}x with parsing); peak {found['first']['peak_mib']} MiB beyond idle; "
            f"second start {found['second']['ready_s']:.2f} s; cache {found['cache_mib']} MiB"
        )
    measure.keep(args.json, "data", record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
