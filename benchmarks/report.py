"""What the figures come to: ratios of one run, what was to be reached, the table, the record on disk."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cases import GOALS, HOST_MS, HOST_SYNCS, PEERS, usual_peers

Figures = Mapping[str, Any]
FACTS = ("gpu", "driver", "torch", "triton", "cudnn", "python", "peers", "commit", "date", "run", "settings")
ORDER = ("floor", "floor_own", "ours", *PEERS)  # of a case's participants, whoever ended first
OWN = {"peak_gib": "peak GiB", "start_s": "seconds to the first step", "ms": "ms per step"}
ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """Of the code that was measured; empty where there is no repository."""
    asked = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip()


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
            found[f"ours_over_{name}"] = round(ours / floor, 5)  # goals are judged by it: 1.1203 is not 1.12
    for name, ms in times.items():
        found[f"{name}_over_ours"] = round(ms / ours, 5)
    if times:
        found["best_peer_over_ours"] = round(min(times.values()) / ours, 5)
    return found


def goals(
    case: str, participants: Mapping[str, Figures], beside: Mapping[str, Mapping[str, Figures]] | None = None
) -> list[dict[str, Any]]:
    """What the case must reach; `beside` are the participants of the other cases of its run."""
    known, own = ratios(participants), participants.get("ours", {})
    ours, rows = time_of(participants, "ours"), []
    for key, bound in GOALS.get(case, {}).items():
        who, _, other = key.partition("@")
        if other:
            theirs = time_of((beside or {}).get(other, {}), who)
            both = ours is not None and theirs is not None
            if who == "ours":
                rows.append(goal(f"ours / {other}", "at most", bound, round(ours / theirs, 5) if both else None))
            else:
                what = f"{who}, {other} / ours"
                rows.append(goal(what, "at least", bound, round(theirs / ours, 5) if both else None))
        elif key == "floor":
            rows.append(goal("ours / floor", "at most", bound, known.get("ours_over_floor")))
        elif key == "best_peer":
            everyone = set(usual_peers(case)) <= {name for name in PEERS if time_of(participants, name)}
            rows.append(goal("best peer / ours", "at least", bound, known["best_peer_over_ours"] if everyone else None))
        elif key in OWN:
            rows.append(goal(OWN[key], "at most", bound, own.get(key)))
        else:
            rows.append(goal(f"{key} / ours", "at least", bound, known.get(f"{key}_over_ours")))
    if "ours" in participants:
        rows.append(goal("host ms per step", "at most", HOST_MS, own.get("host_ms")))
        if "syncs" in own:  # older records do not have them
            rows.append(goal("host syncs in the steps", "at most", HOST_SYNCS, own["syncs"]))
    return rows


def goal(what: str, rule: str, bound: float, value: Any) -> dict[str, Any]:
    """One thing to reach: what, the bound, what it is, and whether that will do (None: not measured). Every record of
    every benchmark lists its own under `goals`."""
    met = None if value is None else bool(value <= bound if rule == "at most" else value >= bound)
    return {"what": what, "rule": rule, "bound": bound, "is": value, "met": met}


def said(found: Mapping[str, Any]) -> str:
    """A goal in one line."""
    verdict = {True: "reached", False: "NOT reached", None: "not measured"}[found["met"]]
    shown = "-" if found["is"] is None else f"{found['is']:g}"
    return f"{found['what']:34}{shown:>9}  {found['rule']} {found['bound']:g}: {verdict}"


def every_goal(record: Any, where: str = "") -> list[dict[str, Any]]:
    """All goals of a record, wherever they stand, each with its place."""
    found: list[dict[str, Any]] = []
    if isinstance(record, Mapping):
        for key, value in record.items():
            if key == "goals" and isinstance(value, list):
                found += [{"where": where} | one for one in value]
            else:
                inside = where if key in ("cases", "kinds", "results") else f"{where} {key}".strip()
                found += every_goal(value, inside)
    return found


def close(result: dict[str, Any]) -> None:
    """Bring what follows from the figures up to date, in every case: some look at others of their run."""
    for name, record in result["cases"].items():
        if not isinstance(record, dict):
            continue
        same = {
            other: there["participants"]
            for other, there in result["cases"].items()
            if record.get("run") and there.get("run") == record["run"]
        }
        close_case(record, name, same)


def close_case(record: dict[str, Any], name: str, beside: Mapping[str, Mapping[str, Figures]] | None = None) -> None:
    """Bring what follows from the participants' figures up to date."""
    places = {who: place for place, who in enumerate(ORDER)}
    found = dict(sorted(record["participants"].items(), key=lambda item: places.get(item[0], len(places))))
    record["participants"] = found
    flops = found.get("floor", {}).get("flops")
    for figures in found.values():
        if flops and figures.get("ms"):
            figures["share_of_989"] = round(flops / figures["ms"] / 1e9 / 989.0, 4)
    record["ratios"], record["goals"] = ratios(found), goals(name, found, beside)


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
        f"{'case':24}{'who':13}{'ms':>9}{'x floor':>9}{'x ours':>8}{'tok/s':>10}{'GiB':>7}{'host ms':>9}{'loss':>8}"
    ]
    for name, record in result["cases"].items():
        found = record["participants"]
        floor, ours = time_of(found, "floor"), time_of(found, "ours")
        for who, figures in found.items():
            ms = time_of(found, who)
            if ms is None:
                lines.append(f"{name:24}{who:13}{line(figures)[:100]}")
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
            lines.append(f"{name:24}{who:13}{''.join(cells)}")
    for name, record in result["cases"].items():
        lines += [f"{name:24}{said(found)}" for found in record["goals"]]
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'':{width}}" if value is None else f"{value:{width}.{digits}f}"


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new record's cases beside the old one's. A case is of one run, or its ratios would compare two: one of the
    same run gains participants, one of another run is replaced."""
    parts = ("cases", "sweeps", "swept")
    whole = (
        old
        | {key: value for key, value in new.items() if key not in parts and (value or key not in old)}
        | {key: old.get(key, {}) | new.get(key, {}) for key in parts if key in old or key in new}
    )
    for name, case in new.get("cases", {}).items():
        there = old.get("cases", {}).get(name)
        if there and case.get("run") and there.get("run") == case["run"]:
            found = dict(there["participants"])
            for who, figures in case["participants"].items():
                if "ms" in figures or "ms" not in found.get(who, {}):  # a time stays where a second try has none
                    found[who] = figures
            whole["cases"][name] = there | case | {"participants": found}
    if "peers" in old or "peers" in new:
        whole["peers"] = old.get("peers", {}) | new.get("peers", {})
    return whole


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Aside and renamed: a run that is cut off leaves the last whole record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)
