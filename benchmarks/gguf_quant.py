"""Quantising to GGUF on a CPU: time and error beside llama.cpp's own quantisers, which the xllamacpp wheel carries.

    python -m benchmarks.gguf_quant [--json FILE] [--values 2097152] [--repeats 9]

Normal values of the size that weights have, in rows of 4096. `cpu` is CPU nanoseconds per value on one thread, ours and
theirs in turn, the least of `repeats`: other work on the machine makes single times longer, never shorter. `wall` is
wall-clock nanoseconds per value with all threads, and means something only where `load`, the work that waited for the
cores beside the benchmark, is small. `error` is our root mean square error over theirs (without an
importance matrix), `same` the share of equal bytes. gguf-py quantises only some types, and is timed for Q8_0.
Goals: Q8_0 no slower than gguf-py, Q4_K within three times llama.cpp's time, no type's error 3% above llama.cpp's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.weights import llama_cpp

from benchmarks import report
from graftune.kernels import gguf_dequant
from graftune.weights.gguf_quant import TYPES, quantise

WIDTH = 4096
BLOCKS = TYPES[3:]
OF_GGUF_PY, OF_LLAMA_CPP, ERROR = 1.0, 3.0, 1.03


def least(works: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of each, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            start = clock()
            work()
            times[name].append(clock() - start)
    return {name: min(values) for name, values in times.items()}


def error(blocks: torch.Tensor, kind: str, x: torch.Tensor) -> float:
    out = torch.empty_like(x)
    gguf_dequant.dequantise(blocks, kind, out)
    return float((out - x).double().square().mean().sqrt())


def by_gguf_py(x: torch.Tensor, kind: str) -> Callable[[], object]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    return lambda: quantize(x.numpy(), GGMLQuantizationType[kind])


def measured(kind: str, x: torch.Tensor, repeats: int, threads: int) -> dict[str, Any]:
    works: dict[str, Callable[[], object]] = {
        "ours": lambda: quantise(x, kind),
        "llama.cpp": lambda: llama_cpp.quantised(x, kind),
    }
    if kind == "Q8_0":
        works["gguf-py"] = by_gguf_py(x, kind)
    try:
        torch.set_num_threads(1)
        cpu = least(works, repeats, time.process_time)
        torch.set_num_threads(threads)
        wall = least({"ours": works["ours"]}, repeats, time.perf_counter)
    finally:
        torch.set_num_threads(threads)
    ours, theirs = quantise(x, kind), llama_cpp.quantised(x, kind)
    return {
        "cpu": {name: round(1e9 * seconds / x.numel(), 2) for name, seconds in cpu.items()},
        "wall": round(1e9 * wall["ours"] / x.numel(), 2),
        "error": round(error(ours, kind, x) / error(theirs, kind, x), 4),
        "same": round(float((ours == theirs).float().mean()), 3),
    }


def measure(values: int, repeats: int) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(max(1, values // WIDTH), WIDTH, generator=drawn).mul_(0.02)
    threads = torch.get_num_threads()
    kinds: dict[str, Any] = {}
    for kind in BLOCKS:
        kinds[kind] = measured(kind, x, repeats, threads)
        print(f"{kind:7} {kinds[kind]}", file=sys.stderr, flush=True)
    eight, four = kinds["Q8_0"]["cpu"], kinds["Q4_K"]["cpu"]
    worst = max(found["error"] for found in kinds.values())
    goals = [
        report.goal("Q8_0, ours / gguf-py", "at most", OF_GGUF_PY, round(eight["ours"] / eight["gguf-py"], 3)),
        report.goal("Q4_K, ours / llama.cpp", "at most", OF_LLAMA_CPP, round(four["ours"] / four["llama.cpp"], 3)),
        report.goal("largest error, ours / llama.cpp", "at most", ERROR, worst),
    ]
    return {
        "kinds": kinds,
        "met": all(goal["met"] for goal in goals),
        "goals": goals,
        "values": x.numel(),
        "repeats": repeats,
        "cpu": processor(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "gguf": version("gguf"),
        "xllamacpp": version("xllamacpp"),
        "commit": report.commit(),
    }


def processor() -> str:
    """The model's name where the system says one."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--values", type=int, default=1 << 21)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    found = measure(options.values, options.repeats)
    for goal in found["goals"]:
        print(f"{goal['what']}: {goal['is']}, {goal['rule']} {goal['bound']}: {'met' if goal['met'] else 'missed'}")
    if options.json:
        text = json.dumps(found, indent=2) + "\n"
        print(text, end="") if options.json == "-" else Path(options.json).write_text(text)
    return 0 if found["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
