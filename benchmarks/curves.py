"""Loss curves on real data: this device against a stored reference, per-layer against global clips, graph on and off.

    python benchmarks/curves.py DATA [--base BASE] [--device cuda] [--steps 200] [--json FILE] [--reference FILE]
    python benchmarks/curves.py DATA --device cpu --compute fp32 --json benchmarks/results/gsm8k-cpu.json

A record holds every step's loss and gradient norm, and the norm of each tensor's gradient at the first step. Against a
reference (the same data, settings and seed) it says how far the curve is, which tensors' first gradients differ by more
than bf16 noise (2% in norm), and by which projection: a wrong backward shows there, even where the loss still falls.
"""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

NOISE = {"loss": 0.005, "norm": 0.02}


def settings(args: argparse.Namespace, folder: str, **more: Any) -> Any:
    from graftune.config import Config

    values = {
        "base": args.base, "data": args.data, "val_split": 0.02, "tokens_per_step": 512, "tokens_per_micro_batch": 512,
        "max_steps": args.steps, "epochs": 3, "patience": 0, "seed": 42, "samples": 0, "score": False,
        "device": args.device, "compute_dtype": args.compute, "out": folder,
    }  # fmt: skip
    return Config.of(values | more)


def curve(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """One run: losses and norms by step, the last validation loss, what its end says of graphs and host time."""
    from graftune.api import train
    from graftune.observe.console import Console

    with tempfile.TemporaryDirectory() as parent:
        folder = train(settings(args, f"{parent}/run", **more), console=Console(quiet=True)).folder
        events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    end = {k: v for k, v in events[-1].items() if k in ("captures", "host_ms", "peak_device_memory")}
    return {
        "losses": [round(e["loss"], 6) for e in steps],
        "norms": [round(e["grad_norm"], 6) for e in steps],
        "validation": [round(e["loss"], 6) for e in events if e["event"] == "eval"],
        "tok_s": round(steps[-1]["tok_s"], 1),
    } | end


def first_norms(args: argparse.Namespace) -> dict[str, float]:
    """Norm of each tensor's gradient (of the mean loss) at the first step, B still zero."""
    from graftune.observe.console import Console
    from graftune.train.loop import Run
    from graftune.train.prepare import prepare_run

    with tempfile.TemporaryDirectory() as parent:
        run = Run(prepare_run(settings(args, f"{parent}/run"), Console(quiet=True)), Console(quiet=True))
        batches = next(iter(run.loader.epoch(0)))
        for batch in batches:
            run.step.micro_step(batch.to(run.engine.runtime.device))
        divisor, arena = sum(batch.response_tokens for batch in batches), run.engine.arena
        norms = {name: float(arena.view(name, arena.grads).norm()) / divisor for name in arena.slots}
        shutil.rmtree(parent, ignore_errors=True)
    return {name: round(norm, 8) for name, norm in norms.items() if norm}


def against(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """How far a record is from its reference."""
    pairs = list(zip(found["global"]["losses"], reference["global"]["losses"], strict=False))
    apart = [abs(a - b) / b for a, b in pairs]
    here, there = found["first_norms"], reference["first_norms"]
    off = {name: here.get(name, 0.0) / norm - 1 for name, norm in there.items()}
    by_kind = collections.defaultdict(list)
    for name, share in off.items():
        by_kind[name.split(".")[-3]].append(abs(share))
    return {
        "steps": len(pairs),
        "loss_apart_mean": round(sum(apart) / len(apart), 5),
        "loss_apart_most": round(max(apart), 5),
        "losses_within_noise": sum(share <= NOISE["loss"] for share in apart),
        "first_norm": [found["global"]["norms"][0], reference["global"]["norms"][0]],
        "tensors_beyond_noise": sum(abs(share) > NOISE["norm"] for share in off.values()),
        "tensors": len(off),
        "worst_by_projection": {kind: round(max(shares), 4) for kind, shares in sorted(by_kind.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--base", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--scratch", default="", help="a folder with config.json and tokenizer: a new model, trained too"
    )
    parser.add_argument("--reference", default="")
    parser.add_argument("--json", default="-")
    args = parser.parse_args()
    found: dict[str, Any] = {"first_norms": first_norms(args), "global": curve(args)}
    if args.device != "cpu":
        found |= {"layer": curve(args, clip_mode="layer"), "eager": curve(args, graph=False)}
    if args.scratch:
        more = {"base": args.scratch, "method": "scratch", "lr": 1e-3, "tokens_per_step": 4096}
        found["scratch"] = curve(args, **more, tokens_per_micro_batch=4096)
    if args.reference:
        found["against"] = against(found, json.loads(Path(args.reference).read_text()))
        print(json.dumps(found["against"], indent=1))
    for name in ("global", "layer", "eager", "scratch"):
        if name in found:
            losses = found[name]["losses"]
            print(f"{name:8} first {losses[0]:.4f} last {losses[-1]:.4f} validation {found[name]['validation']}")
    if args.json != "-":
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
