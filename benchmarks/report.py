"""What the figures come to: ratios of one run, what was to be reached, the table, the record on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cases import GOALS, HOST_MS, PEERS

Figures = Mapping[str, Any]
FACTS = ("gpu", "driver", "torch", "triton", "cudnn", "python", "peers", "commit", "date", "settings")


def time_of(participants: Mapping[str, Figures], name: str) -> float | None:
    """Milliseconds, or None where the participant did not run, failed or was refused."""
    value = participants.get(name, {}).get("ms")
    return float(value) if value else None


def ratios(participants: Mapping[str, Figures]) -> dict[str, Any]:
    """Ours over the floor (lower is better, 1 is the end) and the peers over ours (higher is better for us)."""
    ours = time_of(participants, "ours")
    times = {name: ms for name in PEERS if (ms := time_of(participants, name)) is not None}
    found: dict[str, Any] = {}
    if times:
        found["best_peer"] = min(times, key=lambda name: times[name])
    if ours is None:
        return found
    for name in ("floor", "floor_own"):
        if floor := time_of(participants, name):
            found[f"ours_over_{name}"] = round(ours / floor, 3)
    for name, ms in times.items():
        found[f"{name}_over_ours"] = round(ms / ours, 3)
    if times:
        found["best_peer_over_ours"] = round(min(times.values()) / ours, 3)
    return found


def goals(case: str, participants: Mapping[str, Figures]) -> list[dict[str, Any]]:
    """What the case must reach: what, the bound, what it is, and whether that will do (None: not measured)."""
    wanted = dict(GOALS.get(case, {}))
    known, own = ratios(participants), participants.get("ours", {})
    rows: list[tuple[str, str, float, Any]] = []
    for key, bound in wanted.items():
        if key == "floor":
            rows.append(("ours / floor", "at most", bound, known.get("ours_over_floor")))
        elif key in ("peak_gib", "start_s"):
            what = "peak GiB" if key == "peak_gib" else "seconds to the first step"
            rows.append((what, "at most", bound, own.get(key)))
        else:
            rows.append((f"{key} / ours", "at least", bound, known.get(f"{key}_over_ours")))
    if "ours" in participants:
        rows.append(("host ms a step", "at most", HOST_MS, own.get("host_ms")))
    return [
        {"what": what, "rule": rule, "bound": bound, "is": value, "met": _met(rule, bound, value)}
        for what, rule, bound, value in rows
    ]


def _met(rule: str, bound: float, value: Any) -> bool | None:
    if value is None:
        return None
    return value <= bound if rule == "at most" else value >= bound


def close_case(record: dict[str, Any], name: str) -> None:
    """Bring what follows from the participants' figures up to date."""
    found = record["participants"]
    flops = found.get("floor", {}).get("flops")
    for figures in found.values():
        if flops and figures.get("ms"):
            figures["share_of_989"] = round(flops / figures["ms"] / 1e9 / 989.0, 4)
    record["ratios"], record["goals"] = ratios(found), goals(name, found)


def line(figures: Figures) -> str:
    """One participant in one line."""
    if "error" in figures:
        return f"failed: {figures['error']}"
    if "refused" in figures:
        return f"{figures['refused']}: refused"
    parts = [f"{figures['ms']:9.2f} ms", f"{figures['tok_s'] / 1e3:7.1f}k tok/s"]
    if figures.get("peak_gib") is not None:
        parts.append(f"{figures['peak_gib']:6.1f} GiB")
    if "loss_last" in figures:
        parts.append(f"loss {figures['loss_first']:.3f} to {figures['loss_last']:.3f}, norm {figures['grad_norm']:.3g}")
        parts.append(f"host {figures['host_ms']:.2f} ms")
        if figures["moved"] < 1:
            parts.append(f"only {100 * figures['moved']:.0f}% of the trained tensors moved")
    if "tflops" in figures:
        parts.append(f"{figures['tflops']:.0f} TFLOP/s, {100 * figures['share_of_989']:.0f}% of 989")
    return "  ".join(parts)


def table(result: Mapping[str, Any]) -> str:
    """Short: a line a participant and case, then what was to be reached."""
    lines = [
        f"{'case':20}{'who':13}{'ms':>9}{'x floor':>9}{'x ours':>8}{'tok/s':>10}{'GiB':>7}{'host ms':>9}{'loss':>8}"
    ]
    for name, record in result["cases"].items():
        found = record["participants"]
        floor, ours = time_of(found, "floor"), time_of(found, "ours")
        for who, figures in found.items():
            ms = time_of(found, who)
            if ms is None:
                lines.append(f"{name:20}{who:13}{line(figures)[:100]}")
                continue
            cells = [
                f"{ms:9.2f}",
                f"{ms / floor:9.2f}" if floor else f"{'':9}",
                f"{ms / ours:8.2f}" if ours else f"{'':8}",
                f"{figures['tok_s'] / 1e3:9.1f}k",
                _cell(figures.get("peak_gib"), 7, 1),
                _cell(figures.get("host_ms"), 9, 2),
                _cell(figures.get("loss_last"), 8, 3),
            ]
            lines.append(f"{name:20}{who:13}{''.join(cells)}")
    for name, record in result["cases"].items():
        for goal in record["goals"]:
            verdict = {True: "reached", False: "NOT reached", None: "not measured"}[goal["met"]]
            shown = "-" if goal["is"] is None else f"{goal['is']:g}"
            lines.append(f"{name:20}{goal['what']:27}{shown:>8}  {goal['rule']} {goal['bound']:g}: {verdict}")
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'':{width}}" if value is None else f"{value:{width}.{digits}f}"


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new run's cases in place of the old run's of the same name. A case is whole: its ratios are of one run."""
    return (
        old
        | {key: value for key, value in new.items() if key not in ("cases", "sweeps")}
        | {key: old.get(key, {}) | new.get(key, {}) for key in ("cases", "sweeps")}
    )


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Aside and renamed: a run that is cut off leaves the last whole record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)
