"""Draws a record of step.py: every participant as a multiple of the floor, and the curves of the sweeps.

    python benchmarks/plots.py benchmarks/results/step-h200.json FILE.png     (sweeps: FILE-tokens.png and so on)

The bars stand on 1, the floor, on a logarithmic scale: at small batches the peers are twenty times off and at large
ones less than twice, and both have to be readable. The figure on a bar is its milliseconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

NAMES = {
    "ours": "graftune",
    "unsloth": "Unsloth",
    "liger": "PEFT + Liger",
    "liger-bf16": "PEFT + Liger, bf16 adapters",
    "peft": "PEFT",
    "hf-compiled": "transformers, compiled",
    "hf": "transformers",
}
COLOURS = {
    "ours": "#1b7837",
    "unsloth": "#4393c3",
    "liger": "#f4a582",
    "liger-bf16": "#fddbc7",
    "peft": "#d6604d",
    "hf-compiled": "#8073ac",
    "hf": "#b2abd2",
    "floor": "#444444",
}
AXES = {
    "tokens": "tokens a step",
    "rank": "adapter rank",
    "layers": "layers",
    "documents": "tokens a document (8192 in all)",
}


def draw(result: Mapping[str, Any], target: Path) -> list[Path]:
    made = []
    if result.get("cases") and bars(result, target):
        made.append(target)
    for axis, curves in result.get("sweeps", {}).items():
        path = target.with_name(f"{target.stem}-{axis}{target.suffix}")
        curve(axis, curves, heading(result), path)
        made.append(path)
    return made


def heading(result: Mapping[str, Any]) -> str:
    parts = [result.get("gpu", ""), f"torch {result.get('torch', '')}", str(result.get("date", ""))[:10]]
    return ", ".join(part for part in parts if part.strip())


def bars(result: Mapping[str, Any], target: Path) -> bool:
    """Whether there was anything to draw. Cases without a floor, where activations are recomputed, are left out."""
    groups = []
    for name, record in result["cases"].items():
        found = record["participants"]
        floor = found.get("floor", {}).get("ms")
        times = {who: found[who]["ms"] for who in NAMES if found.get(who, {}).get("ms")}
        if floor and times:
            groups.append((name, floor, times))
    if not groups:
        print("nothing to draw: no case has a floor and a participant")
        return False
    bar, gap = 1.0, 0.9
    total = sum(len(times) * bar + gap for _, _, times in groups)
    figure, axes = plt.subplots(figsize=(max(7.0, 0.42 * total + 1.6), 4.6), layout="constrained")
    at, ticks, shown = 0.0, [], set()
    for name, floor, times in groups:
        ticks.append((at + (len(times) - 1) * bar / 2, f"{name}\nfloor {milliseconds(floor)}"))
        for who, ms in times.items():
            ratio = ms / floor
            label = None if who in shown else NAMES[who]
            shown.add(who)
            axes.bar(at, ratio - 1, bottom=1.0, width=0.92 * bar, color=COLOURS[who], label=label, zorder=2)
            weight = "bold" if who == "ours" else "normal"
            top = max(ratio, 1.0)
            axes.annotate(
                f"{ms:.0f}" if ms >= 99.5 else f"{ms:.1f}",
                (at, top),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=7.5,
                fontweight=weight,
            )
            at += bar
        at += gap
    axes.axhline(1.0, color=COLOURS["floor"], linewidth=1.2, zorder=3)
    axes.set_yscale("log")
    most = max(ms / floor for _, floor, times in groups for ms in times.values())
    least = min(1.0, *(ms / floor for _, floor, times in groups for ms in times.values()))
    axes.set_ylim(0.93 * least, 1.25 * most)
    marks = [m for m in (1, 1.2, 1.5, 2, 3, 5, 10, 20, 30, 50, 100) if m <= 1.25 * most]
    axes.set_yticks(marks)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.set_xticks([x for x, _ in ticks], [text for _, text in ticks], fontsize=8.5)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7, zorder=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_ylabel("time of one step, as a multiple of the floor")
    title = f"One optimizer step in milliseconds (lower is better)\n{heading(result)}"
    axes.set_title(title, fontsize=10, loc="left")
    figure.legend(frameon=False, fontsize=8.5, ncols=len(shown), loc="outside lower center")
    figure.savefig(target, dpi=160)
    plt.close(figure)
    return True


def curve(axis: str, curves: Mapping[str, Any], title: str, target: Path) -> None:
    """Milliseconds above, multiple of the floor below."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7.0, 5.4), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    places: set[int] = set()
    for number, (name, points) in enumerate(curves.items()):
        colour = plt.get_cmap("tab10")(number)
        times = {who: _line(points, who) for who in ("ours", "floor", "floor_own")}
        for who, style in (("ours", "-o"), ("floor", "--")):
            xs, ys = times[who]
            above.plot(xs, ys, style, color=colour, markersize=4, label=f"{NAMES.get(who, who)}, {name}")
            places.update(xs)
        for who, style in (("floor", "-o"), ("floor_own", ":")):
            base = dict(zip(*times[who], strict=True))
            own = {x: y for x, y in zip(*times["ours"], strict=True) if x in base}
            below.plot(list(own), [y / base[x] for x, y in own.items()], style, color=colour, markersize=4)
    for part in (above, below):
        part.set_xscale("log", base=2)
        part.grid(color="#dddddd", linewidth=0.7)
        for side in ("top", "right"):
            part.spines[side].set_visible(False)
    if axis in ("tokens", "layers"):
        above.set_yscale("log")
        above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        above.yaxis.set_minor_locator(NullLocator())
        above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        above.set_ylim(bottom=0)
    above.legend(frameon=False, fontsize=8)
    above.set_ylabel("ms a step")
    above.set_title(f"How a step grows with {AXES[axis]}. {title}", fontsize=10, loc="left")
    below.set_ylabel("x floor")
    low, high = below.get_ylim()
    below.set_ylim(min(0.95, low), max(1.1, high) + 0.3 * (max(1.1, high) - min(0.95, low)))
    handles = [
        Line2D([], [], color="#444444", linestyle="-", label="over the floor"),
        Line2D([], [], color="#444444", linestyle=":", label="over the floor of what our step computes"),
    ]
    below.legend(handles=handles, frameon=False, fontsize=8, ncols=2, loc="upper right")
    below.set_xlabel(AXES[axis])
    if places:
        below.set_xticks(sorted(places), [str(x) for x in sorted(places)])
    below.xaxis.set_minor_locator(NullLocator())
    figure.savefig(target, dpi=160)
    plt.close(figure)


def _line(points: list[dict[str, Any]], who: str) -> tuple[list[int], list[float]]:
    found = [(p["x"], p["participants"][who]["ms"]) for p in points if p["participants"].get(who, {}).get("ms")]
    return [x for x, _ in found], [ms for _, ms in found]


def milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value >= 99.5 else f"{value:.1f} ms"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python benchmarks/plots.py RECORD.json FILE.png")
    for made in draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])):
        print(made)
