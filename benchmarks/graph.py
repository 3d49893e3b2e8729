"""What capturing is worth and that it changes nothing; what accumulation costs.

    python benchmarks/graph.py [--cases 1b-4x512,1.5b-4x512] [--steps 100] [--accumulate 350m-full-4x512] --json FILE

Graphs: the same seeded model and batches, captured and eager: milliseconds a step, the losses at steps 10, 50 and 100,
and in deterministic mode whether losses and weights are the same bits. Accumulation: one optimizer step of N
micro-batches against N times one micro-batch, the update left out of both.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import parse
from benchmarks.ours import ours

AT = (10, 50, 100)


def trained(name: str, steps: int, *, graph: bool, deterministic: bool) -> dict[str, Any]:
    """Losses of every step, milliseconds a step (median of the last half), a digest of the weights."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    runner = ours(parse(name), device, graph=graph, deterministic=deterministic)
    losses, times = [], []
    for index in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        losses.append(runner.step(index)[0])
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    bits = sum(weights.view(torch.int32).to(torch.int64).sum().item() for weights in runner.trained())
    values = [float(loss) for loss in losses]
    del runner, losses
    gc.collect()
    torch.cuda.empty_cache()
    return {"losses": values, "ms": statistics.median(times[steps // 2 :]), "bits": bits}


def graph_against_eager(name: str, steps: int) -> dict[str, Any]:
    captured, eager = (trained(name, steps, graph=graph, deterministic=False) for graph in (True, False))
    short = min(steps, 20)
    same = [trained(name, short, graph=graph, deterministic=True) for graph in (True, False)]
    return {
        "captured_ms": round(captured["ms"], 3),
        "eager_ms": round(eager["ms"], 3),
        "speedup": round(eager["ms"] / captured["ms"], 3),
        "losses": {s: [captured["losses"][s - 1], eager["losses"][s - 1]] for s in AT if s <= steps},
        "most_apart": max(abs(captured["losses"][s - 1] - eager["losses"][s - 1]) for s in AT if s <= steps),
        "deterministic_steps": short,
        "bit_equal": same[0]["losses"] == same[1]["losses"] and same[0]["bits"] == same[1]["bits"],
    }


def accumulation(name: str, micro: int) -> dict[str, Any]:
    """Milliseconds of N micro-steps in a row against N times one, each timed by events, without the update."""
    times = {}
    for count in (1, micro):
        torch.manual_seed(0)
        case = parse(name if count == 1 else f"{name}x{count}")
        runner = ours(case, torch.device("cuda"), without_update=True)
        for index in range(4):
            runner.step(index)
        rounds = []
        for index in range(10):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            runner.step(index)
            end.record()
            torch.cuda.synchronize()
            rounds.append(begin.elapsed_time(end))
        times[count] = statistics.median(rounds)
        del runner
        gc.collect()
        torch.cuda.empty_cache()
    return {"one_ms": times[1], f"{micro}_ms": times[micro], "ratio": round(times[micro] / (micro * times[1]), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="1b-4x512,1.5b-4x512")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accumulate", default="350m-full-4x512")
    parser.add_argument("--json", default="-")
    parser.add_argument("--commit", default="", help="of the code that runs")
    args = parser.parse_args()
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
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
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
