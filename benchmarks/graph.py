"""What capturing is worth and that it changes nothing; what accumulation costs.

    python benchmarks/graph.py [--cases 1b-4x512,1.5b-4x512] [--steps 100] [--accumulate 350m-full-4x512] [--json FILE]

Graphs: the same seeded model and batches, captured and eager: milliseconds a step, the losses at steps 10, 50 and 100,
and in deterministic mode whether losses and weights are the same bits. Accumulation: one optimizer step of N
micro-batches against N times one micro-batch, the update left out of both. Exit code 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import parse
from benchmarks.measure import Runner, synchronise
from benchmarks.ours import ours

from benchmarks import report

AT = (10, 50, 100)
SPEEDUP, LOSS_APART, ACCUMULATED = 1.10, 0.1, 1.03


def here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """sha256 of their bytes, in order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def trained(name: str, steps: int, *, graph: bool, deterministic: bool) -> dict[str, Any]:
    """Losses of every step, milliseconds a step (median of the last half), a digest of the weights."""
    torch.manual_seed(0)
    device = here()
    runner = ours(parse(name), device, graph=graph, deterministic=deterministic)
    losses, times = [], []
    for index in range(steps):
        synchronise(device)
        begin = time.perf_counter()
        losses.append(runner.step(index)[0])
        synchronise(device)
        times.append(1e3 * (time.perf_counter() - begin))
    bits = digest(runner.trained())
    values = [float(loss) for loss in losses]
    del runner, losses
    forget()
    return {"losses": values, "ms": statistics.median(times[steps // 2 :]), "bits": bits}


def graph_against_eager(name: str, steps: int) -> dict[str, Any]:
    captured, eager = (trained(name, steps, graph=graph, deterministic=False) for graph in (True, False))
    short = min(steps, 20)
    same = [trained(name, short, graph=graph, deterministic=True) for graph in (True, False)]
    at = [step for step in AT if step <= steps] or [steps]
    speedup = round(eager["ms"] / captured["ms"], 3)
    apart = max(abs(captured["losses"][s - 1] - eager["losses"][s - 1]) for s in at)
    equal = same[0]["losses"] == same[1]["losses"] and same[0]["bits"] == same[1]["bits"]
    return {
        "captured_ms": round(captured["ms"], 3),
        "eager_ms": round(eager["ms"], 3),
        "speedup": speedup,
        "losses": {s: [captured["losses"][s - 1], eager["losses"][s - 1]] for s in at},
        "most_apart": apart,
        "deterministic_steps": short,
        "bit_equal": equal,
        "goals": [
            report.goal("eager / captured", "at least", SPEEDUP, speedup),
            report.goal(f"losses apart at steps {', '.join(map(str, at))}", "at most", LOSS_APART, apart),
            report.goal("bit-equal in deterministic mode", "at least", 1, int(equal)),
        ],
    }


def accumulation(name: str, micro: int) -> dict[str, Any]:
    """Milliseconds of N micro-steps in a row against N times one, without the update."""
    times, device = {}, here()
    for count in (1, micro):
        torch.manual_seed(0)
        case = parse(name if count == 1 else f"{name}x{count}")
        runner = ours(case, device, without_update=True)
        for index in range(4):
            runner.step(index)
        rounds = []
        for index in range(10):
            rounds.append(_timed(runner, index, device))
        times[count] = statistics.median(rounds)
        del runner
        forget()
    ratio = round(times[micro] / (micro * times[1]), 4)
    reach = report.goal(f"{micro} micro-batches / {micro} times one", "at most", ACCUMULATED, ratio)
    return {"one_ms": times[1], f"{micro}_ms": times[micro], "ratio": ratio, "goals": [reach]}


def _timed(runner: Runner, index: int, device: torch.device) -> float:
    """By events where there are any."""
    if device.type != "cuda":
        start = time.perf_counter()
        runner.step(index)
        return 1e3 * (time.perf_counter() - start)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    runner.step(index)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="1b-4x512,1.5b-4x512")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accumulate", default="350m-full-4x512")
    parser.add_argument("--json", default="-")
    parser.add_argument("--commit", default="", help="of the code that runs")
    args = parser.parse_args()
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "commit": args.commit,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
    for name in filter(None, args.cases.split(",")):
        found[name] = graph_against_eager(name, args.steps)
        print(name, json.dumps(found[name]), flush=True)
    if args.accumulate:
        found[args.accumulate] = accumulation(args.accumulate, 4)
        print(args.accumulate, json.dumps(found[args.accumulate]), flush=True)
    if args.json != "-":
        report.write(Path(args.json), found)
    goals = report.every_goal(found)
    print("\n".join(f"{one['where']:24}{report.said(one)}" for one in goals))
    return int(any(one["met"] is False for one in goals))


if __name__ == "__main__":
    sys.exit(main())
