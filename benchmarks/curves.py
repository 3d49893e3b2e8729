"""Loss curves on real data: how far kinds of base, precisions and modes are apart over the same steps.

    python benchmarks/curves.py DATA [--base BASE] [--runs bf16,fp8] [--steps 200] [--json FILE]
    python benchmarks/curves.py DATA --runs bf16,bf16-deterministic,fp32,eager,layer-clip
    python benchmarks/curves.py DATA --runs bf16,fp32 --reference benchmarks/results/cpu-arm.json

Every run has the same base, data, adapters and seed; the first is what the others are compared with. BASE is the
bundled SmolLM2 unless it is given; DATA is GSM8K's training file in the figures of the documents, of which the first
1,500 records are taken (--limit). What bf16 by itself does to a curve is shown by `bf16-deterministic`, which rounds
elsewhere (another attention, other products). --reference adds the curve `fp32` of another record, made on another
machine with the same data and settings.

`step_apart` is the mean over the steps of |loss / other loss - 1|, `most_apart` its largest, `total_apart` the same of
the sums of all losses. A record holds every step's loss, the data's digest and the settings.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import measure

LIMIT = 1500  # records
RUNS: dict[str, dict[str, Any]] = {
    "auto": {},
    "bf16": {"base_dtype": "bf16", "compute_dtype": "bf16"},
    "fp32": {"base_dtype": "fp32", "compute_dtype": "fp32"},
    "fp8": {"base_dtype": "fp8", "compute_dtype": "bf16"},
    "nf4": {"base_dtype": "nf4"},
    "keep": {"base_dtype": "keep"},
    "bf16-deterministic": {"base_dtype": "bf16", "compute_dtype": "bf16", "deterministic": True},
    "eager": {"graph": False},
    "layer-clip": {"clip_mode": "layer"},
}


def curve(name: str, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run: its losses by step, its validation losses and its speed."""
    from graftune.api import train
    from graftune.observe.console import Console
    from graftune.observe.events import read_events
    from graftune.settings.config import Config

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        values = {
            "base": options.base, "data": str(data), "val_split": 0.02, "tokens_per_step": 512,
            "tokens_per_micro_batch": 512, "max_steps": options.steps, "epochs": 3, "patience": 0, "seed": 42,
            "samples": 0, "score": False, "device": options.device, "out": str(folder),
        }  # fmt: skip
        train(Config.of(values | RUNS[name]), console=Console(quiet=True))
        events = list(read_events(folder / "metrics.jsonl"))
    steps = [event for event in events if event["event"] == "step"]
    return {
        "losses": [round(event["loss"], 5) for event in steps],
        "grad_norm": round(steps[-1]["grad_norm"], 5),
        "validation": [round(event["loss"], 5) for event in events if event["event"] == "eval"],
        "tok_s": round(steps[-1]["tok_s"], 1),
    }


def compared(here: list[float], there: list[float]) -> dict[str, float]:
    apart = [abs(a / b - 1) for a, b in zip(here, there, strict=False)]
    count = len(apart)
    return {
        "step_apart": round(sum(apart) / count, 5),
        "most_apart": round(max(apart), 5),
        "total_apart": round(sum(here[:count]) / sum(there[:count]) - 1, 5),
    }


def first_records(source: Path, limit: int, folder: Path) -> Path:
    if not limit:
        return source
    target = folder / source.name
    with source.open("rb") as file:
        target.write_bytes(b"".join(islice((line for line in file if line.strip()), limit)))
    return target


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--base", default="")
    parser.add_argument("--runs", default="bf16,fp8", help=f"of {', '.join(RUNS)}; the first is compared with")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--limit", type=int, default=LIMIT, help="records of DATA that are taken; 0: all")
    parser.add_argument("--reference", default="", help="a record whose fp32 curve is shown beside")
    parser.add_argument("--commit", default="", help="where there is no .git to ask")
    parser.add_argument("--json", default="", help="a GPU's record, or - to print")
    options = parser.parse_args(words)
    asked = [name for name in options.runs.split(",") if name]
    if unknown := set(asked) - set(RUNS):
        parser.error(f"--runs: unknown {', '.join(sorted(unknown))}; known are {', '.join(RUNS)}")
    if options.limit and Path(options.data).suffix not in (".jsonl", ".ndjson"):
        parser.error("--limit takes the first lines: DATA must be .jsonl, or the limit 0")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = first_records(Path(options.data), options.limit, Path(folder))
        about = measure.facts(options.commit) | {"sha256": hashlib.sha256(data.read_bytes()).hexdigest()}
        for name in asked:
            found[name] = about | {"steps": options.steps} | curve(name, data, options)
            print(line(name, found[name], found[asked[0]], asked[0]), flush=True)
    if options.reference:
        reference = measure.read(Path(options.reference))["curves"]["fp32"]
        for name in asked:
            found[name]["to_reference"] = compared(found[name]["losses"], reference["losses"])
            print(f"{name:20} to the reference: {found[name]['to_reference']}")
    measure.keep(options.json, "curves", found)
    return 0


def line(name: str, made: dict[str, Any], first: dict[str, Any], beside: str) -> str:
    said = f"{name:20} loss {made['losses'][0]:.4f} to {made['losses'][-1]:.4f}, validation {made['validation'][-1]}"
    said += f", norm {made['grad_norm']:.4g}, {made['tok_s']:.0f} tok/s"
    if made is not first:
        made["beside"] = beside
        made |= compared(made["losses"], first["losses"])
        said += f"; against {beside}: {made['step_apart']:.3%} by step, at most {made['most_apart']:.3%}"
        said += f", mean of all losses {made['total_apart']:+.3%}"
    return said


if __name__ == "__main__":
    sys.exit(main())
