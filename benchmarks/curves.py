"""Loss curves on real data: this device against a stored reference, a quantised base against a dequantised one,
per-layer against global clips, graph on and off.

    python benchmarks/curves.py DATA [--base BASE] [--device cuda] [--steps 200] [--json FILE] [--reference FILE]
    python benchmarks/curves.py DATA --base-dtype fp8 --steps 200        nf4,keep --steps 100
    python benchmarks/curves.py DATA --device cpu --compute fp32 --json benchmarks/results/gsm8k-cpu.json
    python benchmarks/curves.py DATA --device cpu --compute fp32 --json ... --only scratch --steps 25

DATA is GSM8K's training file, of which the first 1,500 records are taken (--limit). The model from scratch is that of
benchmarks/models/small with the base's tokenizer.

A record holds the commit, the date and a digest of the data, every step's loss and gradient norm, and the norm of each
tensor's gradient at the first step. Against a reference (the same data, settings and seed, in fp32) two runs of this
device are measured, of SmolLM2 and of the model from scratch. In fp32 only the order of sums differs, so curve and
gradients must be the same: a wrong backward shows there, tensor by tensor, even where the loss still falls. In bf16
values are rounded, weights among them: how far that takes a curve is shown by a second run in bf16 that rounds
elsewhere (deterministic mode: other attention, other products), and how far the gradients by the number of tensors
whose norm is off by more than 2%.

With --base-dtype nothing else runs but those bases and what each is measured by: fp8 and keep (a GGUF's own blocks) by
the same base resident in bf16, nf4 by `dequantised`, the base whose projections were quantised to NF4 and back before
they became resident in the compute dtype (bf16, but on a CPU without units for it). Same adapters, same data: what
differs is how the weights are held. Beside them bf16 runs once more, rounded elsewhere. apart.py has the goals (none of
fp8: its losses are told as they are); the exit code is 1 where one is missed, also where bf16 itself would miss it.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.apart import BESIDE, NOISE, against, compared, falls, gradients_off, losses_apart, said

from benchmarks import report

CLIP_APART = 0.5
LIMIT = 1500  # records
# The model from scratch. A schedule that does not know its end: a CPU's reference may have the first steps only.
SCRATCH = {
    "method": "scratch", "lr": 1e-3, "schedule": "constant", "warmup": 0.0, "max_steps": 200, "tokens_per_step": 512,
    "tokens_per_micro_batch": 512,
}  # fmt: skip
SMALL = Path(__file__).resolve().parent / "models" / "small"
HELD = {"dequantised": {"base_dtype": "bf16"}}
KINDS = ("bf16", *BESIDE, "dequantised")


@contextmanager
def limited(args: argparse.Namespace) -> Iterator[None]:
    """args.data is a file of its first records while this lasts."""
    whole = args.data
    with tempfile.TemporaryDirectory() as folder:
        if args.limit:
            with open(whole, "rb") as file:
                records = list(islice((line for line in file if line.strip()), args.limit))
            args.data = str(Path(folder) / Path(whole).name)
            Path(args.data).write_bytes(b"".join(records))
        try:
            yield
        finally:
            args.data = whole


@contextmanager
def scratch_model(args: argparse.Namespace) -> Iterator[str]:
    """The folder of the model to train from scratch; where no tokenizer lies in it, a copy with the base's."""
    from graftune.weights.base import open_base

    if (Path(args.scratch) / "tokenizer.json").is_file():
        yield args.scratch
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(Path(args.scratch) / "config.json", folder)
        open_base(args.base).tokenizer.save(Path(folder))
        yield folder


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    """Code, day, machine and data of a record."""
    data = Path(args.data).read_bytes()
    device = {} if args.device == "cpu" or not torch.cuda.is_available() else {"gpu": torch.cuda.get_device_name()}
    return device | {
        "torch": torch.__version__,
        "commit": args.commit or (report.commit() if shutil.which("git") else ""),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "data": {"lines": data.count(b"\n"), "sha256": hashlib.sha256(data).hexdigest()},
    }


def settings(args: argparse.Namespace, folder: str, kind: str = "", **more: Any) -> Any:
    from graftune.config import Config

    values = {
        "base": args.base, "data": args.data, "val_split": 0.02, "tokens_per_step": 512, "tokens_per_micro_batch": 512,
        "max_steps": args.steps, "epochs": 3, "patience": 0, "seed": 42, "samples": 0, "score": False,
        "device": args.device, "compute_dtype": args.compute, "out": folder,
    }  # fmt: skip
    if kind:
        values |= HELD.get(kind, {"base_dtype": kind})
    return Config.of(values | more)


def opened(args: argparse.Namespace, folder: str, kind: str = "", **more: Any) -> Any:
    """A run before its first step, its base held in one of KINDS, or as `auto` has it."""
    from graftune.observe.console import Console
    from graftune.session import open_engine
    from graftune.training.loop import Run
    from graftune.training.prepare import prepare_run
    from graftune.weights.placement import Placement

    quiet = Console(quiet=True)
    prepared = prepare_run(settings(args, folder, kind, **more), quiet)
    if kind == "dequantised":
        runtime = prepared.engine.runtime
        base, placement = through_nf4(prepared.engine.base, runtime.device), Placement(runtime.compute_name, "from NF4")
        engine = open_engine(prepared.engine.config, base=base, placement=placement)
        prepared = dataclasses.replace(prepared, engine=engine)
    return Run(prepared, quiet)


def through_nf4(base: Any, device: torch.device) -> Any:
    """The base with what NF4 makes of its projections: the bytes that base_dtype nf4 holds, read as values."""
    from graftune.model.frozen import Nf4Rows

    tensors = {
        name: Nf4Rows.quantised(source, device) if name.endswith("_proj.weight") else source
        for name, source in base.tensors.items()
    }
    return dataclasses.replace(base, tensors=tensors)


def curve(args: argparse.Namespace, kind: str = "", **more: Any) -> dict[str, Any]:
    """One run: losses and norms by step, the last validation loss, what its end says of graphs and host time."""
    with tempfile.TemporaryDirectory() as parent:
        run = opened(args, f"{parent}/run", kind, **more)
        run.start()
        folder = run.go().folder
        events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    end = {k: v for k, v in events[-1].items() if k in ("captures", "host_ms", "peak_device_memory")}
    return {
        "losses": [round(e["loss"], 6) for e in steps],
        "norms": [round(e["grad_norm"], 6) for e in steps],
        "validation": [round(e["loss"], 6) for e in events if e["event"] == "eval"],
        "tok_s": round(steps[-1]["tok_s"], 1),
    } | end


def first_gradients(args: argparse.Namespace, kind: str = "", **more: Any) -> dict[str, torch.Tensor]:
    """Each tensor's gradient (of the mean loss) at the first step; those of A are left out: B is still zero."""
    with tempfile.TemporaryDirectory() as parent:
        run = opened(args, f"{parent}/run", kind, **more)
        batches = next(iter(run.loader.epoch(0)))
        for batch in batches:
            run.step.micro_step(batch.to(run.engine.runtime.device))
        divisor, arena = sum(batch.response_tokens for batch in batches), run.engine.arena
        grads = {name: arena.view(name, arena.grads).cpu() / divisor for name in arena.slots}
    return {name: grad for name, grad in grads.items() if grad.any()}


def norms_of(grads: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: round(float(grad.norm()), 8) for name, grad in grads.items()}


def kinds(args: argparse.Namespace, asked: list[str]) -> dict[str, Any]:
    """The bases asked for, those they are measured by, and bf16 once more, rounded elsewhere."""
    judged = [kind for kind in asked if kind in BESIDE]
    wanted = dict.fromkeys([*asked, *(BESIDE[kind] for kind in judged), *(["bf16", "rounded"] if judged else [])])
    grads: dict[str, dict[str, torch.Tensor]] = {}
    found: dict[str, Any] = provenance(args) | {"curves": {}, "compared": {}}
    for name in wanted:
        kind, more = ("bf16", {"deterministic": True}) if name == "rounded" else (name, {})
        grads[name] = first_gradients(args, kind, **more)
        found["curves"][name] = made = curve(args, kind, **more)
        first, last = made["losses"][0], made["losses"][-1]
        print(f"{name:12} first {first:.4f} last {last:.4f} {made['tok_s']:.0f} tok/s", flush=True)
        save(args, found)
    for kind in judged:
        found["compared"][kind] = compared(found, kind, grads)
    return found


def save(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """As it stands: a run that is cut short keeps what it has."""
    if args.json not in ("", "-"):
        report.write(Path(args.json), found)


def scratch_curve(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    asked = SCRATCH | {"max_steps": min(args.steps, SCRATCH["max_steps"])}
    with scratch_model(args) as folder:
        return {"settings": asked} | curve(args, base=folder, **(asked | more))


def usual(args: argparse.Namespace) -> dict[str, Any]:
    """The base as it is by default: clips, graphs, a model from scratch, and the reference."""
    grads = first_gradients(args)
    found: dict[str, Any] = provenance(args) | {"first_norms": norms_of(grads), "goals": []}

    def add(name: str, make: Any = curve, **more: Any) -> None:
        found[name] = made = make(args, **more)
        first, last = made["losses"][0], made["losses"][-1]
        print(f"{name:15} first {first:.4f} last {last:.4f} validation {made['validation']}", flush=True)
        save(args, found)

    add("global")
    if args.device != "cpu":
        add("layer", clip_mode="layer")
        add("eager", graph=False)
        clips = abs(found["layer"]["losses"][-1] - found["global"]["losses"][-1])
        eager = losses_apart(found["global"]["losses"], found["eager"]["losses"])["loss_apart_most"]
        found["goals"] += [
            report.goal("clips: last losses apart", "at most", CLIP_APART, round(clips, 5)),
            report.goal("captured / eager: loss apart, most", "at most", NOISE["loss"], eager),
        ]
    if args.scratch:
        add("scratch", scratch_curve)
        found["goals"].append(falls(found["scratch"]))
    if args.reference:
        reference = json.loads(Path(args.reference).read_text())
        add("rounded", deterministic=True)
        add("fp32", compute_dtype="fp32")
        if args.scratch and "scratch" in reference:
            add("scratch_rounded", scratch_curve, deterministic=True)
            add("scratch_fp32", scratch_curve, compute_dtype="fp32")
        exact = first_gradients(args, compute_dtype="fp32")
        found["first_norms_fp32"], found["first_gradients"] = norms_of(exact), gradients_off(grads, exact)
        found["against"] = against(found, reference)
        print(json.dumps({k: v for k, v in found["against"].items() if k != "goals"}, indent=1))
    return found


def only_scratch(args: argparse.Namespace) -> dict[str, Any]:
    """The record that is there, if one is, with the model from scratch made anew."""
    path = Path(args.json)
    found = json.loads(path.read_text()) if path.is_file() else {}
    goals = [goal for goal in found.get("goals", []) if not goal["what"].startswith("scratch")]
    made = provenance(args) | scratch_curve(args)
    whole = made["settings"]["max_steps"] == SCRATCH["max_steps"]
    return found | {"scratch": made, "goals": [*goals, *([falls(made)] if whole else [])]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--base", default="")
    parser.add_argument("--base-dtype", default="", help=f"of {', '.join(KINDS)}; several with commas")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--limit", type=int, default=LIMIT, help="records of DATA that are taken; 0: all")
    parser.add_argument("--scratch", default=str(SMALL), help="a folder with config.json: a new model, trained too")
    parser.add_argument("--only", default="", choices=("", "scratch"), help="a curve to put into the record of --json")
    parser.add_argument("--commit", default="", help="where there is no .git to ask")
    parser.add_argument("--reference", default="")
    parser.add_argument("--json", default="", help="a file, or - for stdout")
    args = parser.parse_args()
    asked = [kind for kind in args.base_dtype.split(",") if kind]
    if unknown := set(asked) - set(KINDS):
        parser.error(f"--base-dtype: unknown {', '.join(sorted(unknown))}; known are {', '.join(KINDS)}")
    if args.limit and Path(args.data).suffix not in (".jsonl", ".ndjson"):
        parser.error("--limit takes the first lines: DATA must be .jsonl, or the limit 0")
    with limited(args):
        found = kinds(args, asked) if asked else only_scratch(args) if args.only else usual(args)
    goals = report.every_goal(found)
    print("\n".join(map(said, goals)) or "no goals here: a reference is made, or nothing was compared")
    if args.json == "-":
        print(json.dumps(found))
    save(args, found)
    return int(any(goal["met"] is False for goal in goals))


if __name__ == "__main__":
    sys.exit(main())
