"""Loss curves on real data: this device against a stored reference, a quantised base against a dequantised one,
per-layer against global clips, graph on and off.

    python benchmarks/curves.py DATA [--base BASE] [--device cuda] [--steps 200] [--json FILE] [--reference FILE]
    python benchmarks/curves.py DATA --base-dtype fp8 --steps 200        nf4,keep --steps 100
    python benchmarks/curves.py DATA --device cpu --compute fp32 --json benchmarks/results/gsm8k-cpu.json
    python benchmarks/curves.py DATA --device cpu --compute fp32 --json ... --only scratch     leaves the rest as it is

DATA is GSM8K's training file, of which the first 1,500 records are taken (--limit). The model from scratch is that of
benchmarks/models/small with the base's tokenizer.

A record holds every step's loss and gradient norm, and the norm of each tensor's gradient at the first step. Against a
reference (the same data, settings and seed, in fp32) two runs of this device are measured. In fp32 only the order of
sums differs, so curve and gradients must be the same: a wrong backward shows there, tensor by tensor, even where the
loss still falls. In bf16 values are rounded, weights among them: how far that takes a curve is shown by a second run in
bf16 that rounds elsewhere (deterministic mode: other attention, other products), and how far the gradients by the share
of tensors whose norm is off by more than 2%.

With --base-dtype nothing else runs but those bases and what each is measured by: fp8 and keep (a GGUF's own blocks) by
the same base resident in bf16, nf4 by `dequantised`, the base whose projections were quantised to NF4 and back before
they became resident in the compute dtype (bf16, but on a CPU without units for it). Same adapters, same data: what
differs is how the weights are held. The exit code is 1 where a loss or a first gradient is further off than bf16 noise.
"""

from __future__ import annotations

import argparse
import collections
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

from benchmarks import report

NOISE = {"loss": 0.005, "norm": 0.02, "cosine": 0.999}  # of bf16
FP32 = {"loss": 0.001, "norm": 0.001}
CLIP_APART = 0.5
WINDOW = 20  # steps over which a curve is smoothed
LIMIT = 1500  # records
# The model from scratch, for the reference and for what is held against it: what one core does in seven minutes.
SCRATCH = {"method": "scratch", "lr": 1e-3, "max_steps": 80, "tokens_per_step": 512, "tokens_per_micro_batch": 512}
SCRATCH_FALL = 0.5  # of the first loss: what the last may be
SMALL = Path(__file__).resolve().parent / "models" / "small"
BESIDE = {"fp8": "bf16", "keep": "bf16", "nf4": "dequantised"}  # what is measured by what
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
        values["base_dtype"] = "bf16" if kind == "dequantised" else kind
    return Config.of(values | more)


def opened(args: argparse.Namespace, folder: str, kind: str = "", **more: Any) -> Any:
    """A run before its first step, its base held in one of KINDS, or as `auto` has it."""
    from graftune.observe.console import Console
    from graftune.train.engine import open_engine
    from graftune.train.loop import Run
    from graftune.train.prepare import prepare_run
    from graftune.weights.load import Placement

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


def first_norms(args: argparse.Namespace, **more: Any) -> dict[str, float]:
    return {name: round(float(grad.norm()), 8) for name, grad in first_gradients(args, **more).items()}


def losses_apart(here: list[float], there: list[float]) -> dict[str, Any]:
    """Step by step, relative; and the curves smoothed, means of WINDOW steps."""
    apart = [abs(a - b) / b for a, b in zip(here, there, strict=False)]
    starts = range(0, len(apart), WINDOW)
    smooth = [abs(sum(here[i : i + WINDOW]) / sum(there[i : i + WINDOW]) - 1) for i in starts]
    return {
        "steps": len(apart),
        "loss_apart_mean": round(sum(apart) / len(apart), 5),
        "loss_apart_most": round(max(apart), 5),
        "smooth_apart_most": round(max(smooth), 5),
        "losses_within_noise": sum(share <= NOISE["loss"] for share in apart),
    }


def norms_off(here: dict[str, float], there: dict[str, float], bound: float) -> dict[str, Any]:
    """Of each tensor's first gradient."""
    off = {name: abs(here.get(name, 0.0) / norm - 1) for name, norm in there.items()}
    by_kind = collections.defaultdict(list)
    for name, share in off.items():
        by_kind[name.split(".")[-3]].append(share)
    return {
        "tensors": len(off),
        "tensors_beyond": sum(share > bound for share in off.values()),
        "bound": bound,
        "worst_by_projection": {kind: round(max(shares), 5) for kind, shares in sorted(by_kind.items())},
    }


def against(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """How far a record is from its reference: in fp32, in bf16, and two runs in bf16 from each other."""
    there = reference["global"]
    runs = {name: losses_apart(found[name]["losses"], there["losses"]) for name in ("fp32", "global", "rounded")}
    between = losses_apart(found["rounded"]["losses"], found["global"]["losses"])
    exact = norms_off(found["first_norms_fp32"], reference["first_norms"], FP32["norm"])
    rounded = norms_off(found["first_norms"], reference["first_norms"], NOISE["norm"])
    norm = found["global"]["norms"][0] / there["norms"][0] - 1
    return {
        "fp32": runs["fp32"] | exact,
        "bf16": runs["global"] | rounded | {"first_norm": [found["global"]["norms"][0], there["norms"][0]]},
        "bf16, rounded elsewhere": runs["rounded"],
        "the two in bf16": between,
        "goals": [
            report.goal("fp32: loss apart, most", "at most", FP32["loss"], runs["fp32"]["loss_apart_most"]),
            report.goal("fp32: first gradients beyond 0.1%", "at most", 0, exact["tensors_beyond"]),
            report.goal("bf16: loss apart, mean", "at most", NOISE["loss"], runs["global"]["loss_apart_mean"]),
            report.goal("bf16: first gradient norm off", "at most", NOISE["norm"], round(abs(norm), 5)),
        ],
    }


def compared(found: dict[str, Any], kind: str, grads: dict[str, dict[str, torch.Tensor]]) -> dict[str, Any]:
    """A kind against what it is measured by: losses, and the first gradients tensor by tensor. (Those of fp8 are
    reported only: its products are of 3 bits, and what is asked of it is the loss.)"""
    other = BESIDE[kind]
    apart = losses_apart(found["curves"][kind]["losses"], found["curves"][other]["losses"])
    here, there = grads[kind], grads[other]
    norms = {name: abs(float(here[name].norm() / grad.norm()) - 1) for name, grad in there.items() if name in here}
    cosines = {
        name: float(torch.nn.functional.cosine_similarity(here[name].flatten(), grad.flatten(), 0))
        for name, grad in there.items()
        if name in here
    }
    most, least = round(max(norms.values()), 5), round(min(cosines.values()), 6)
    goals = [
        report.goal(f"{kind}: loss apart, mean", "at most", NOISE["loss"], apart["loss_apart_mean"]),
    ]
    if kind == "fp8":  # a step's own loss jumps by more than that in bf16 too, wherever it rounds
        smooth = apart["smooth_apart_most"]
        goals.append(report.goal(f"{kind}: loss apart, {WINDOW} steps, most", "at most", NOISE["loss"], smooth))
    else:
        goals += [
            report.goal(f"{kind}: loss apart, most", "at most", NOISE["loss"], apart["loss_apart_most"]),
            report.goal(f"{kind}: first gradient, norm off", "at most", NOISE["norm"], most),
            report.goal(f"{kind}: first gradient, cosine", "at least", NOISE["cosine"], least),
            report.goal(f"{kind}: tensors with a gradient", "at least", len(there), len(norms)),
        ]
    worst = max(norms, key=lambda name: norms[name])
    return {"beside": other} | apart | {"norm_off": most, "cosine": least, "worst": worst, "goals": goals}


def kinds(args: argparse.Namespace, asked: list[str]) -> dict[str, Any]:
    """The bases asked for and those they are measured by."""
    wanted = dict.fromkeys(asked) | {BESIDE[kind]: None for kind in asked if kind in BESIDE}
    grads, found = {}, {"curves": {}, "compared": {}}
    for kind in wanted:
        grads[kind] = first_gradients(args, kind)
        found["curves"][kind] = made = curve(args, kind)
        print(
            f"{kind:12} first {made['losses'][0]:.4f} last {made['losses'][-1]:.4f} {made['tok_s']:.0f} tok/s",
            flush=True,
        )
        save(args, found)
    for kind in asked:
        if kind in BESIDE:
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
    found: dict[str, Any] = provenance(args) | {"first_norms": first_norms(args), "goals": []}

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
        found["first_norms_fp32"] = first_norms(args, compute_dtype="fp32")
        found["against"] = against(found, reference)
        print(json.dumps({k: v for k, v in found["against"].items() if k != "goals"}, indent=1))
    return found


def falls(made: dict[str, Any]) -> dict[str, Any]:
    share = round(made["losses"][-1] / made["losses"][0], 4)
    return report.goal("scratch: last loss over the first", "at most", SCRATCH_FALL, share)


def only_scratch(args: argparse.Namespace) -> dict[str, Any]:
    """The record that is there, if one is, with the model from scratch made anew."""
    path = Path(args.json)
    found = json.loads(path.read_text()) if path.is_file() else {}
    goals = [goal for goal in found.get("goals", []) if not goal["what"].startswith("scratch")]
    made = provenance(args) | scratch_curve(args)
    return found | {"scratch": made, "goals": [*goals, falls(made)]}


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
    print("\n".join(map(report.said, goals)) or "no goals here: a reference is made, or nothing was compared")
    if args.json == "-":
        print(json.dumps(found))
    save(args, found)
    return int(any(goal["met"] is False for goal in goals))


if __name__ == "__main__":
    sys.exit(main())
