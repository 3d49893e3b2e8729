"""From the command to the adapter: where the seconds of a short run go, with warm and with empty caches.

    python benchmarks/start.py [--base BASE] [--data FILE] [--rows 999] [--json FILE] [--ways cold,warm,two]

A small model is fine-tuned from beginning to end in a process of its own: the bundled SmolLM2 on 999 instructions (made
from a seed unless --data gives some), 3 epochs of 8,192-token steps, with the evaluations, checkpoints, answers and the
picture that a run has by default. `cold` begins with empty caches of Triton, of CUDA and of our own, `warm` finds what
`cold` left, `two` starts two warm ones at once and shows the slower. Files are in the page cache every time.

`import torch` is timed in the same process. `adapter` is everything else until the adapter is written: the
interpreter's start, our imports, and every phase of the run; `end` goes on to the end of the process, with the answers
of base and tuned model and the picture. Phases are what the run says of itself: its console's and its log's times.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROOT = Path(__file__).resolve().parents[1]
WARM_S, COLD_S, TWO = 3.0, 11.0, 1.3  # seconds beyond `import torch` on an H200; two at once, as a multiple of one
CACHES = {"TRITON_CACHE_DIR": "triton", "GRAFTUNE_CACHE": "graftune", "CUDA_CACHE_PATH": "cuda"}
ENDS = {
    "run_start": "start of the run",
    "sample": "answers",
    "run_end": "end of the run",
}
WRITTEN = "writing the adapter"
SUMS = {"adapter": "to the adapter, without torch", "end": "to the end, without torch", "total": "all"}
TOPICS = ["rivers", "music", "bread", "the moon", "trains", "a garden", "history", "rain", "numbers", "a letter"]
VERBS = ["Describe", "Explain", "Summarise", "Compare", "List facts about", "Write a note on"]


def worker(base: str, data: str, folder: Path, device: str, steps: int) -> dict[str, Any]:
    """A run in this process. Every entry of the timeline is the end of a phase that began at the entry before."""
    timeline = [(time.time(), "")]

    def ended(phase: str) -> None:
        timeline.append((time.time(), phase))

    import torch  # noqa: F401

    ended("import torch")
    from graftune.cli import app  # noqa: F401

    ended("import graftune: command line")
    from graftune import api
    from graftune.observe.console import Console
    from graftune.observe.events import read_events
    from graftune.settings.config import Config

    gc.freeze()  # as the command does
    ended("import graftune: engine")

    class Timed(Console):
        @contextmanager
        def working(self, label: str) -> Iterator[None]:
            with super().working(label):
                yield
            ended(label)

    values = {"base": base, "data": data, "epochs": 3, "tokens_per_step": 8192, "out": str(folder), "device": device}
    api.train(Config.of(values | ({"max_steps": steps} if steps else {})), console=Timed(quiet=True))
    ended("picture, closing")
    trained = evaluated = 0
    for event in read_events(folder / "metrics.jsonl"):
        kind = event["event"]
        if kind == "step":
            trained += 1
        elif kind == "eval":
            evaluated += 1
        first = {"step": trained == 1, "eval": evaluated == 1}.get(kind, False)
        names = {"step": "first step" if first else "training", "eval": "first evaluation" if first else "evaluations"}
        if kind in ENDS or kind in names:
            timeline.append((event["time"], ENDS.get(kind) or names[kind]))
    written = next(at for at, phase in timeline if phase == WRITTEN)
    return {"phases": seconds_of(timeline), "steps": trained, "written": written}


def seconds_of(timeline: list[tuple[float, str]]) -> dict[str, float]:
    ordered = sorted(timeline, key=lambda entry: entry[0])
    phases: dict[str, float] = {}
    for (before, _), (at, phase) in itertools.pairwise(ordered):
        phases[phase] = phases.get(phase, 0.0) + at - before
    return {phase: round(seconds, 3) for phase, seconds in phases.items()}


def timed(options: argparse.Namespace, caches: Path, count: int) -> dict[str, Any]:
    """So many runs at once; figures of the slowest, from its start to its exit."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda number: _one(options, caches, Path(folder), number), range(count)))
    return max(found, key=lambda one: one["total"])


def _one(options: argparse.Namespace, caches: Path, work: Path, number: int) -> dict[str, Any]:
    out = work / f"{number}.json"
    words = [sys.executable, str(Path(__file__).resolve()), "--worker", str(out), "--folder", str(work / str(number))]
    words += ["--base", options.base, "--data", options.data, "--device", options.device]
    words += ["--max-steps", str(options.max_steps)]
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    own = {name: str(caches / place) for name, place in CACHES.items()} | {"PYTHONPATH": os.pathsep.join(paths)}
    began = time.time()
    done = subprocess.run(words, env=os.environ | own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    total = time.time() - began
    if done.returncode:
        raise SystemExit(f"a run failed: {done.stderr.strip()[-2000:]}")
    found = dict(json.loads(out.read_text()))
    phases = found["phases"]
    phases["interpreter's start and end"] = round(total - sum(phases.values()), 3)
    torch_s, to_adapter = phases["import torch"], found.pop("written") - began
    return found | {
        "total": round(total, 2),
        "adapter": round(to_adapter - torch_s, 2),
        "end": round(total - torch_s, 2),
    }


def goals(ways: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    from benchmarks import measure

    found = []
    for way, bound in (("warm", WARM_S), ("cold", COLD_S)):
        beyond = ways.get(way, {}).get("adapter")
        found.append(measure.goal(f"{way}: seconds beyond import torch to the adapter", "at most", bound, beyond))
    both = "two" in ways and "warm" in ways
    ratio = round(ways["two"]["total"] / ways["warm"]["total"], 3) if both else None
    return [*found, measure.goal("two at once / one", "at most", TWO, ratio)]


def table(ways: dict[str, dict[str, Any]]) -> str:
    phases = dict.fromkeys(phase for found in ways.values() for phase in found["phases"])
    lines = [f"{'seconds':36}" + "".join(f"{way:>10}" for way in ways)]
    for phase in phases:
        lines.append(f"{phase:36}" + "".join(f"{found['phases'].get(phase, 0):10.2f}" for found in ways.values()))
    for key, words in (
        ("adapter", "to the adapter, without torch"),
        ("end", "to the end, without torch"),
        ("total", "all"),
    ):
        lines.append(f"{words:36}" + "".join(f"{found[key]:10.2f}" for found in ways.values()))
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="", help="a GGUF file or a Hugging Face folder; default: the bundled one")
    parser.add_argument("--data", default="", help="rows to train on; default: made from a seed")
    parser.add_argument("--rows", type=int, default=999, help="so many are made")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-steps", type=int, default=0, help="0: three epochs")
    parser.add_argument("--ways", default="cold,warm,two")
    parser.add_argument("--json", default="", help="a GPU's record, or - to print")
    parser.add_argument("--commit", default="", help="where there is no .git to ask")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.worker:
        found = worker(options.base, options.data, Path(options.folder), options.device, options.max_steps)
        Path(options.worker).write_text(json.dumps(found))
        return 0
    from benchmarks import measure  # imports torch, which a worker times

    ways: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if not options.data:
            options.data = str(Path(folder) / "instructions.jsonl")
            make_data(Path(options.data), options.rows)
        for way in options.ways.split(","):
            ways[way] = timed(options, Path(folder) / "caches", 2 if way == "two" else 1)
    print(table(ways))
    reached = goals(ways)
    print("\n".join(map(measure.said, reached)))
    measure.keep(options.json, "start", measure.facts(options.commit) | {"ways": ways, "goals": reached})
    return 0


def make_data(path: Path, rows: int) -> None:
    """Instructions of 5 to 30 words with answers of 20 to 120."""
    drawn = random.Random(7)
    with path.open("w") as file:
        for number in range(rows):
            topic = drawn.choice(TOPICS)
            instruction = f"{drawn.choice(VERBS)} {topic}, number {number}. " + said(drawn, 5, 25)
            file.write(json.dumps({"instruction": instruction, "input": "", "output": said(drawn, 20, 120)}) + "\n")


def said(drawn: random.Random, least: int, most: int) -> str:
    words = [drawn.choice(TOPICS).split()[-1] for _ in range(drawn.randint(least, most))]
    return " ".join(words).capitalize() + "."


if __name__ == "__main__":
    sys.exit(main())
