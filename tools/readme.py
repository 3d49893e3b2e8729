"""Writes the generated parts of README.md and docs/: the table of settings from the code, the benchmark and memory
tables from their records, and the image of the sweeps where it was drawn.

python tools/readme.py          rewrites the documents in place; a test checks that nothing is left to rewrite

A part stands between `<!-- name -->` and `<!-- end name -->`, in any document. What was to be reached on a GPU is
listed whether or not there is a record of it: what has none is `not measured yet`.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import GOALS, SWEEPS

from benchmarks import report
from graftune.config import leaves

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
ABSENT = "not measured yet"
# The README's rows: a case, and what it is in words.
SPEED = {
    "8b-4x2048": "8B LoRA, bf16, 8,192 tokens per step",
    "8b-1x512": "8B LoRA, bf16, 512 tokens per step",
    "8b-nf4-4x2048-offload": "8B QLoRA (NF4), 8,192 tokens, recomputing from host memory",
    "350m-full-4x512x4": "350M, every weight, 4 x 2,048 tokens",
}
PEER_NAMES = {"unsloth": "Unsloth", "peft": "PEFT", "liger": "PEFT + Liger", "hf-compiled": "transformers, compiled"}
# Records beside the steps': (their name, the part of them, what it is and what makes it).
OTHERS = (
    ("graph", "1b-4x512", "graph against eager, 1b-4x512 (`graph.py`)"),
    ("graph", "1.5b-4x512", "graph against eager, 1.5b-4x512 (`graph.py`)"),
    ("graph", "350m-full-4x512", "accumulation, 350m-full-4x512 (`graph.py`)"),
    ("gsm8k", "", "SmolLM2 on GSM8K, 200 steps, against the CPU in fp32 (`curves.py`)"),
    ("bases-fp8", "", "the same over FP8 against bf16, 200 steps (`curves.py`)"),
    ("bases-quantised", "", "over NF4 and the file's blocks against both dequantised, 100 steps (`curves.py`)"),
    ("kernels", "", "dequantisation of every kind, to the bit and near a copy's speed (`quant_kernels.py`)"),
    ("plan", "", "memory planned against measured (`plan.py`)"),
    ("refusal", "", "a run that does not fit is refused, and the one suggested instead runs (`refusal.py`)"),
)


def settings() -> str:
    lines = ["| setting | default | what it does |", "|---|---|---|"]
    section = ""
    for leaf in leaves():
        if leaf.section != section:
            section = leaf.section
            lines.append(f"| **{section}** | | |")
        default = ", ".join(leaf.default) if isinstance(leaf.default, tuple) else leaf.default
        shown = f"`{default}`" if default not in ("", (), {}) else "(empty)"
        lines.append(f"| `{leaf.name}` | {shown} | {leaf.help} |")
    return "\n".join(lines)


def cpu() -> str:
    lines = ["| machine | ours, tok/s | PEFT bf16 | PEFT fp32 | floor | ratio to PEFT bf16 / to the faster PEFT |"]
    lines.append("|---|---|---|---|---|---|")
    for result in _records("cpu"):
        speed = result["tok_s"]
        ours = next(n for n in speed if n.startswith("graftune"))
        dtype = ours.split()[-1]
        ratios = f"{result['ratio']} / {result['ratio_best']}"
        figures = [speed[name] for name in (ours, "PEFT bf16", "PEFT fp32", "floor")]
        columns = [f"{result['cpu']} ({dtype})", *figures, ratios]
        lines.append("| " + " | ".join(map(str, columns)) + " |")
    return "\n".join(lines)


def speed() -> str:
    """Four rows for the README, each from one run with its fastest peer."""
    lines = ["| one step | graftune | fastest peer in the same run | ratio |", "|---|---|---|---|"]
    found = {name: case for record in _records("step") for name, case in record["cases"].items()}
    for name, words in SPEED.items():
        who = found[name]["participants"]
        ours = who["ours"]
        peers = {peer: figures for peer, figures in who.items() if peer in PEER_NAMES and "ms" in figures}
        best = min(peers, key=lambda peer: peers[peer]["ms"])
        columns = [words, _figures(ours), f"{PEER_NAMES[best]}: {_figures(peers[best])}"]
        lines.append("| " + " | ".join([*columns, f"{peers[best]['ms'] / ours['ms']:.2f}x"]) + " |")
    return "\n".join(lines)


def _figures(found: dict[str, Any]) -> str:
    return f"{found['tok_s']:,.0f} tokens/s, {found['peak_gib']:.1f} GiB"


def fit() -> str:
    """For the README: the least memory of each precision, and the quickest way."""
    lines = ["| model | LoRA, bf16 | QLoRA, NF4 |", "|---|---|---|"]
    for name, row in _fit()["rows"].items():
        bf16 = f"{_gib(row['bf16 full'])} to {_gib(row['bf16 none'])}"
        lines.append(f"| {name} | {bf16} | {_gib(row['nf4 offload'])} to {_gib(row['nf4 none'])} |")
    return "\n".join(lines)


def fit_by_policy() -> str:
    """For docs/memory.md: every way that was planned."""
    ways = list(next(iter(_fit()["rows"].values())))
    lines = ["| model | " + " | ".join(f"`{way.replace(' ', '`, `')}`" for way in ways) + " |"]
    lines.append("|---" * (1 + len(ways)) + "|")
    for name, row in _fit()["rows"].items():
        columns = [name, *(_gib(row[way]) for way in ways)]
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


def _fit() -> dict[str, Any]:
    return dict(json.loads((ROOT / "benchmarks" / "results" / "fit.json").read_text()))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


def gpu() -> str:
    return _steps() + "\n\n" + _goals()


def _steps() -> str:
    peers = "peers, ms (as multiples of ours)"
    lines = [f"| GPU, case | ours: ms, tok/s, peak | floor, ms | ours / floor | {peers} | commit |"]
    lines.append("|---|---|---|---|---|---|")
    for record in _records("step"):
        for name, case in record["cases"].items():
            who = case["participants"]
            ours, floor = who.get("ours", {}), who.get("floor", {}).get("ms")
            if "ms" not in ours:
                continue
            own = f"{ours['ms']:.1f}, {ours['tok_s'] / 1000:.1f}k, {ours['peak_gib']:.1f} GiB"
            others = [n for n in who if n not in ("ours", "floor", "floor_own") and "ms" in who[n]]
            beside = ", ".join(f"{n} {who[n]['ms']:.0f} ({who[n]['ms'] / ours['ms']:.2f}x)" for n in others) or "-"
            share = [f"{floor:.1f}", f"{ours['ms'] / floor:.2f}"] if floor else ["-", "-"]
            if floor and "ms_sustained" in ours:
                share[1] += f" (sustained {ours['ms_sustained'] / floor:.2f})"
            lines.append("| " + " | ".join([f"{record['gpu']}, {name}", own, *share, beside, case["commit"]]) + " |")
    return "\n".join(lines)


def _goals() -> str:
    """One row a case or record, measured or not."""
    lines = ["| to be reached on an H200 | goal | measured |", "|---|---|---|"]
    found: dict[str, Any] = {}
    for record in _records("step"):
        report.close(record)
        found |= record["cases"]
    for name in GOALS:
        rows = found[name]["goals"] if name in found else report.goals(name, {})
        lines.append(_row(f"`{name}`", rows))
    for kind, part, what in OTHERS:
        rows = [row for record in _records(kind) for row in report.every_goal(record) if row["where"].startswith(part)]
        lines.append(_row(what, rows))
    return "\n".join(lines)


def _row(what: str, goals: list[dict[str, Any]]) -> str:
    asked = [f"{goal['what']} {'≤' if goal['rule'] == 'at most' else '≥'} {goal['bound']:g}" for goal in goals]
    if not goals or all(goal["is"] is None for goal in goals):
        measured = [ABSENT]
    elif len(goals) > 6:
        asked, missed = [f"{len(goals)} of them"], [goal for goal in goals if not goal["met"]]
        measured = [f"{len(goals) - len(missed)} reached", *(f"{g['where']} {g['what']}: missed" for g in missed)]
    else:
        words = {True: "reached", False: "missed"}
        measured = [ABSENT if g["is"] is None else f"{g['is']:.5g} ({words[g['met']]})" for g in goals]
    return f"| {what} | {', '.join(asked) or '-'} | {', '.join(measured)} |"


def sweeps() -> str:
    """The images that there are, each with what its record holds."""
    parts = []
    for path in sorted(IMAGES.glob("sweeps-*.png")):
        found = json.loads((RESULTS / path.name.replace("sweeps", "step")).with_suffix(".json").read_text())["sweeps"]
        *most, last = [axis for axis in SWEEPS if axis in found]
        said = f"The same step as {', '.join(most)} and {last} grow" if most else f"The same step as {last} grows"
        said += ", beside the floor of each size."
        if missing := [axis for axis in SWEEPS if axis not in found]:
            said += f" Not run yet: {', '.join(missing)}."
        timed: dict[str, list[dict[str, Any]]] = {
            axis: [point["participants"].get("ours", {}) for curve in curves.values() for point in curve]
            for axis, curves in found.items()
        }
        if failed := [axis for axis, ours in timed.items() if not all("ms" in each for each in ours)]:
            said += f" Ours failed at some sizes of: {', '.join(failed)}."
        if not all("sustained_s" in each for ours in timed.values() for each in ours if "ms" in each):
            said += (
                " Ours was timed after a few steps and the floor after a second, when the chip's clocks have fallen:"
                " the shorter a step, the nearer it looks."
            )
        image = f"![Milliseconds of a step and its multiple of the floor as sizes grow](images/{path.name})"
        parts.append(f"{image}\n\n{said}")
    return "\n\n".join(parts)


def _records(kind: str) -> list[dict[str, Any]]:
    paths = sorted(RESULTS.glob(f"{kind}-*.json"))
    # gsm8k-cpu.json is what the others are held against.
    return [json.loads(path.read_text()) for path in paths if path.name != "gsm8k-cpu.json"]


def layers() -> str:
    """The rows that tests/test_layers.py enforces, the highest first."""
    rows = list(enumerate(importlib.import_module("tests.test_layers").ROWS))
    there = {path.name.removesuffix(".py") for path in (ROOT / "src" / "graftune").iterdir()}
    shown = [f"{number}  {'  '.join(name for name in row if name in there)}" for number, row in reversed(rows)]
    return "\n".join(["```", *shown, "```"])


PARTS: dict[str, Callable[[], str]] = {
    "layers": layers,
    "settings": settings,
    "cpu": cpu,
    "gpu": gpu,
    "sweeps": sweeps,
    "speed": speed,
    "fit": fit,
    "fit by policy": fit_by_policy,
}


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rewritten(text: str) -> str:
    for name, make in PARTS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
        if begin not in text:
            continue
        made = make()
        whole = begin + (f"{made}\n" if made else "") + end
        text = re.sub(f"{begin}.*?{end}", lambda _, whole=whole: whole, text, count=1, flags=re.S)
    return text


if __name__ == "__main__":
    for path in documents():
        path.write_text(rewritten(path.read_text()))
