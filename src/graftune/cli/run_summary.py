"""The summary at the end of a run: what was trained, what changed, where it is, and the next three commands."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

FILES = (("adapter", "the adapter"), ("model", "the model"), ("report.html", "the report"), ("loss.png", "the curves"))


def run_summary(result: Any) -> str:
    """The text for a run that was not interrupted; `result` is a TrainResult."""
    lines = [*_trained(result), *_changed(result), *_location(result.folder)]
    return "\n".join([*lines, "next:", *_next(result.folder)])


def _trained(result: Any) -> list[str]:
    count = "1 step" if result.steps == 1 else f"{result.steps} steps"
    reason = "" if result.stopped == "finished" else f" ({result.stopped})"
    what = result.summary.get("trained", "")
    return [f"trained: {what}, {count}{reason}" if what else f"trained: {count}{reason}"]


def _changed(result: Any) -> list[str]:
    """Before and after, as far as both are known."""
    found: list[str] = []
    if result.first_eval is not None and result.best_eval is not None:
        share = result.best_eval / result.first_eval - 1 if result.first_eval else 0.0
        found.append(f"validation loss {result.first_eval:.3f} -> {result.best_eval:.3f} ({share:+.1%})")
        best = result.summary.get("best_step", -1)
        if 0 < best < result.steps:
            found[-1] += f", best at step {best}, which is kept"
    metric = result.summary.get("metric") or {}
    if metric.get("best") is not None:
        start = "" if metric["start"] is None else f"{metric['start']:.3f} -> "
        found.append(f"{metric['name']} {start}{metric['best']:.3f}")
    scores = result.summary.get("score") or {}
    if {"base", "tuned"} <= set(scores):
        base, tuned = scores["base"], scores["tuned"]
        found.append(f"exactly right {base['exact']:.0%} -> {tuned['exact']:.0%} of {tuned['total']} unseen records")
    return [f"changed: {'; '.join(found)}"] if found else []


def _location(folder: Path) -> list[str]:
    files = [f"{what} in {name}" for name, what in FILES if (folder / name).exists()]
    return [f"run folder: {shlex.quote(str(folder))}" + (f" ({', '.join(files)})" if files else "")]


def _next(folder: Path) -> list[str]:
    quoted = shlex.quote(str(folder))
    compare, base_too = (" --compare", " --base-too") if (folder / "adapter").is_dir() else ("", "")
    beside = ", beside its base" if compare else ""  # a full model has none
    rows = (
        (f"graftune chat {quoted}{compare}", f"talk to it{beside}"),
        (f"graftune eval {quoted} DATA.jsonl{base_too}", "its loss on other data"),
        (f"graftune export {quoted} --to gguf", "for llama.cpp, Ollama and LM Studio"),
    )
    width = max(len(command) for command, _ in rows)
    return [f"  {command:<{width}}  # {why}" for command, why in rows]
