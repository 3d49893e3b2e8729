"""The details of one run: its command, settings, plan, answers, warnings and checkpoints."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

from graftune.dashboard.json_safe import json_safe
from graftune.dashboard.log import Log, step_of
from graftune.dashboard.reading import is_file, read_bytes, read_json
from graftune.dashboard.runs import CONFIG, Document, WatchedRun
from graftune.observe.events import Event, shown_answers

PROFILE = "profile.json"
MOST_SAMPLES, MOST_WARNINGS = 4000, 500


def details(run: WatchedRun, differing: list[str]) -> Document:
    """The run's document in the list, and everything else."""
    with run.log() as log:
        last = {kind: log.of(kind)[-1] if log.of(kind) else None for kind in ("run_start", "memory", "run_end")}
        config = read_bytes(run.folder / CONFIG, 1 << 20)
        return {
            **run.document(differing),
            "folder": str(run.folder),
            "command": command(run.folder, log),
            "config_yaml": "" if config is None else config.decode("utf-8", "replace"),
            "plan": json_safe(read_json(run.folder / "plan.json", 1 << 20)),
            "memory": last["memory"],
            "warnings": warnings(log),
            "samples": samples(log),
            "evals": evals(log),
            "start": last["run_start"],
            "end": last["run_end"],
            "profile": is_file(run.folder / PROFILE),
            "checkpoints": checkpoints(run.folder),
            "offset": log.offset,
        }


def command(folder: Path, log: Log) -> str:
    """The command line that started the run, if its log has it; otherwise an equivalent one."""
    for event in log.of("run_start"):
        if isinstance(event.get("command"), str) and event["command"]:
            return str(event["command"])
    return f"graftune train -c {shlex.quote(str(folder / CONFIG))} --out NEW-FOLDER"


def warnings(log: Log) -> list[Document]:
    found = [{"step": step_of(e), "text": str(e.get("text"))} for e in log.of("warning")[-MOST_WARNINGS:]]
    if log.bad:
        lines = "1 line" if log.bad == 1 else f"{log.bad} lines"
        found.append({"step": None, "text": f"{lines} of metrics.jsonl cannot be read as an event"})
    return found


def evals(log: Log) -> list[Event]:
    """Evaluations in the order of their steps, the last of each."""
    by_step = {step: event for event in log.of("eval") if (step := step_of(event)) is not None}
    return [by_step[step] for step in sorted(by_step)]


def samples(log: Log) -> list[Document]:
    """Answers to the run's prompts, one row per prompt and step. The base answers at step 0, or at the end."""
    prompts: list[Any] = []
    base: list[Any] = []
    by_step: dict[int, list[Any]] = {}
    for event in log.of("sample"):
        step = step_of(event)
        if step is None or not isinstance(event.get("answers"), list):
            continue
        answers = shown_answers(event)
        if isinstance(event.get("prompts"), list):
            prompts = event["prompts"]
        if step == 0 or event.get("who") == "base":
            base = answers
        else:
            by_step[step] = answers
    rows = by_step or ({0: base} if base else {})
    return [
        {"step": step, "prompt": _at(prompts, i), "base": _at(base, i), "tuned": answer if step else None}
        for step in sorted(rows)
        for i, answer in enumerate(rows[step])
    ][-MOST_SAMPLES:]


def _at(texts: list[Any], place: int) -> str | None:
    return str(texts[place]) if place < len(texts) else None


def checkpoints(folder: Path) -> list[str]:
    """What the chat box can load: the result and the checkpoints. Links, which lead out of the folder, are left out."""
    found = []
    if any((folder / name).is_dir() and not (folder / name).is_symlink() for name in ("adapter", "model")):
        found.append("adapter")
    try:
        if (folder / "checkpoints").is_symlink():
            return found
        names = [entry.name for entry in os.scandir(folder / "checkpoints") if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return found
    steps = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step-([0-9]{1,15})", name)))
    return [*found, *(f"step-{step}" for step in reversed(steps))]
