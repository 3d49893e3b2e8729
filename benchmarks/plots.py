"""Draws a GPU's record: every participant of a step as a multiple of the floor, and the curves of the sweeps.

    python benchmarks/plots.py [RECORD.json FOLDER]    step-GPU.png and sweeps-GPU.png;
                                                       default: the documents' images

The bars stand on 1, the floor, on a logarithmic scale: at small batches the peers are twenty times off and at large
ones less than twice, and both have to be readable. Cases without a floor, where activations are computed again, stand
below in milliseconds. The figure on a bar is its milliseconds.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from graftune.arithmetic import ceil_div

ROOT = Path(__file__).resolve().parents[1]
RECORDS = [ROOT / "benchmarks" / "results" / "h200.json"]
IMAGES = ROOT / "docs" / "images"
BAR, GAP, LEAST, WIDEST = 1.0, 0.9, 2.7, 32.0  # of a bar, between groups, of a group, of a row
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


def images(record: Path, folder: Path) -> list[Path]:
    """step-GPU.png and sweeps-GPU.png of GPU.json, as far as it has them."""
    result, made = json.loads(record.read_text()), []
    if bars(result, target := folder / f"step-{record.stem}.png"):
        made.append(target)
    found = {axis: result["sweeps"][axis]["curves"] for axis in AXES if axis in result.get("sweeps", {})}
    if found:
        made.append(folder / f"sweeps-{record.stem}.png")
        sweeps(found, heading(result["sweeps"], result), made[-1])
    return made


def heading(part: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """The GPU, and of the newest entry the version of torch and the day."""
    newest = max(part.values(), key=lambda entry: str(entry.get("date", "")))
    parts = [record.get("gpu", ""), f"torch {newest.get('torch', '')}", str(newest.get("date", ""))[:10]]
    return ", ".join(part for part in parts if part.strip())


class Group(NamedTuple):
    """A case's bars."""

    name: str
    floor: float | None
    times: dict[str, float]
    peak: float | None

    @property
    def width(self) -> float:
        return max(len(self.times) * BAR + GAP, LEAST)

    @property
    def label(self) -> str:
        """In two lines: what trains, and the size with what is behind it."""
        parts = self.name.split("-")
        size = next((i for i, part in enumerate(parts) if re.fullmatch(r"\d+x[\dx]+", part)), len(parts))
        name = "\n".join("-".join(part) for part in (parts[:size], parts[size:]) if part)
        if self.floor:
            return f"{name}\nfloor {milliseconds(self.floor)}"
        return name + (f"\n{self.peak:.1f} GiB" if self.peak else "")


def bars(result: Mapping[str, Any], target: Path) -> bool:
    """Whether there was anything to draw."""
    groups = []
    for name, record in result.get("steps", {}).items():
        found = record["participants"]
        times = {who: found[who]["ms"] for who in NAMES if found.get(who, {}).get("ms")}
        if times:
            peak = found.get("ours", {}).get("peak_gib")
            groups.append(Group(name, found.get("floor", {}).get("ms"), times, peak))
    if not groups:
        print("nothing to draw: no case has a time")
        return False
    rows = [row for floor in (True, False) for row in wrapped([g for g in groups if bool(g.floor) == floor])]
    widest = max(sum(group.width for group in row) for row in rows)
    size = max(7.0, 0.42 * widest + 1.6), 0.9 + 3.7 * len(rows)
    figure, panels = plt.subplots(len(rows), 1, figsize=size, squeeze=False, layout="constrained")
    for axes, row in zip(panels[:, 0], rows, strict=True):
        panel(axes, row)
        axes.set_xlim(-GAP / 2, widest - GAP / 2)  # a bar is as wide in every row
    title = f"One optimizer step in milliseconds (lower is better)\n{heading(result['steps'], result)}"
    panels[0, 0].set_title(title, fontsize=10, loc="left")
    shown = [who for who in NAMES if any(who in group.times for group in groups)]
    handles = [Patch(color=COLOURS[who], label=NAMES[who]) for who in shown]
    figure.legend(handles=handles, frameon=False, fontsize=8.5, ncols=len(shown), loc="outside lower center")
    figure.savefig(target, dpi=160)
    plt.close(figure)
    return True


def wrapped(groups: Sequence[Group]) -> list[list[Group]]:
    """In rows that are not too wide to read."""
    rows: list[list[Group]] = []
    for group in groups:
        if not rows or sum(each.width for each in rows[-1]) + group.width > WIDEST:
            rows.append([])
        rows[-1].append(group)
    return rows


def panel(axes: Any, groups: Sequence[Group]) -> None:
    """Multiples of the floor, or milliseconds: all groups of a panel have a floor, or none has."""
    base = 1.0 if groups[0].floor else 0.0
    at, ticks, heights = 0.0, [], []
    for group in groups:
        middle = at + (group.width - GAP) / 2
        ticks.append((middle, group.label))
        for place, (who, ms) in enumerate(group.times.items()):
            height = ms / group.floor if group.floor else ms
            heights.append(height)
            x = middle + (place - (len(group.times) - 1) / 2) * BAR
            axes.bar(x, height - base, bottom=base, width=0.92 * BAR, color=COLOURS[who], zorder=2)
            axes.annotate(
                f"{ms:.0f}" if ms >= 99.5 else f"{ms:.1f}",
                (x, max(height, base)),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=7.5,
                fontweight="bold" if who == "ours" else "normal",
            )
        at += group.width
    if base:
        axes.axhline(1.0, color=COLOURS["floor"], linewidth=1.2, zorder=3)
        axes.set_yscale("log")
        most = max(heights)
        axes.set_ylim(0.93 * min(1.0, *heights), 1.25 * most)
        axes.set_yticks([m for m in (1, 1.2, 1.5, 2, 3, 5, 10, 20, 30, 50, 100) if m <= 1.25 * most])
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.set_ylabel("time of one step, as a multiple of the floor")
    else:
        axes.set_ylim(0, 1.15 * max(heights))
        axes.set_ylabel("ms per step (no floor: computed again)")
    axes.set_xticks([x for x, _ in ticks], [text for _, text in ticks], fontsize=8.5)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7, zorder=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def sweeps(found: Mapping[str, Any], title: str, target: Path) -> None:
    """One figure, two axes in a row."""
    across = min(2, len(found))
    down = ceil_div(len(found), across)
    figure = plt.figure(figsize=(7.0 * across, 5.4 * down), layout="constrained")
    parts = figure.subfigures(down, across, squeeze=False).flat
    for part, (axis, curves) in zip(parts, found.items(), strict=False):
        curve(part, axis, curves, title if len(found) == 1 else "")
    if len(found) > 1:
        figure.suptitle(f"How a step grows, beside its floor. {title}", fontsize=11)
    figure.savefig(target, dpi=160 if len(found) == 1 else 120)
    plt.close(figure)


def curve(figure: Any, axis: str, curves: Mapping[str, Any], title: str) -> None:
    """Milliseconds above, multiple of the floor below."""
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    places: set[int] = set()
    for number, (name, points) in enumerate(curves.items()):
        colour = plt.get_cmap("tab10")(number)
        times = {who: _line(points, who) for who in ("ours", "floor")}
        for who, style in (("ours", "-o"), ("floor", "--")):
            xs, ys = times[who]
            above.plot(xs, ys, style, color=colour, markersize=4, label=f"{NAMES.get(who, who)}, {name}")
            places.update(xs)
        base = dict(zip(*times["floor"], strict=True))
        own = {x: y for x, y in zip(*times["ours"], strict=True) if x in base}
        below.plot(list(own), [y / base[x] for x, y in own.items()], "-o", color=colour, markersize=4)
    for part in (above, below):
        part.set_xscale("log", base=2)
        part.grid(color="#dddddd", linewidth=0.7)
        for side in ("top", "right"):
            part.spines[side].set_visible(False)
    if axis in ("tokens", "layers"):
        above.set_yscale("log")
        low, high = above.get_ylim()
        marks = [mark * 10**power for power in range(-2, 7) for mark in (1, 2, 5)]
        above.set_ylim(max(m for m in marks if m <= low), min(m for m in marks if m >= high))  # both ends have a figure
        above.yaxis.set_major_locator(FixedLocator(marks))
        above.yaxis.set_minor_locator(NullLocator())
        above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        above.set_ylim(bottom=0)
    above.legend(frameon=False, fontsize=8)
    above.set_ylabel("ms per step")
    above.set_title(f"How a step grows with {AXES[axis]}. {title}".strip(), fontsize=10, loc="left")
    below.set_ylabel("x floor")
    low, high = below.get_ylim()
    below.set_ylim(min(0.95, low), max(1.1, high) + 0.3 * (max(1.1, high) - min(0.95, low)))
    below.set_xlabel(AXES[axis])
    if places:
        below.set_xticks(sorted(places), [str(x) for x in sorted(places)])
    below.xaxis.set_minor_locator(NullLocator())


def _line(points: list[dict[str, Any]], who: str) -> tuple[list[int], list[float]]:
    found = [(p["x"], p[who]) for p in points if p.get(who)]
    return [x for x, _ in found], [ms for _, ms in found]


def milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value >= 99.5 else f"{value:.1f} ms"


if __name__ == "__main__":
    if len(sys.argv) not in (1, 3):
        sys.exit("usage: python benchmarks/plots.py [RECORD.json FOLDER]")
    for drawn in (
        [(Path(sys.argv[1]), Path(sys.argv[2]))] if len(sys.argv) == 3 else [(each, IMAGES) for each in RECORDS]
    ):
        print(*images(*drawn), sep="\n")
