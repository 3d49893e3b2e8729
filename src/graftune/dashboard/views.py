"""The details of one run: its command, settings, plan, answers, warnings and checkpoints."""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path

from graftune.dashboard.log import Log
from graftune.dashboard.reading import is_file, read_bytes, read_json
from graftune.dashboard.runs import CONFIG, Document, WatchedRun
from graftune.observe.events import Event, evals, resume_marks, sample_rows, step_of

PROFILE = "profile.json"
MOST_SAMPLES, MOST_WARNINGS = 4000, 500


def details(run: WatchedRun, log: Log, differing: list[str]) -> Document:
    """The run's document in the list, and everything else."""
    shown = ("run_start", "answers", "memory", "routing", "run_end")
    last = {kind: log.of(kind)[-1] if log.of(kind) else None for kind in shown}
    config = read_bytes(run.folder / CONFIG, 1 << 20)
    return {
        **run.document(differing),
        "folder": str(run.folder),
        "command": command(run.folder, last["run_start"] or {}),
        "config_yaml": "" if config is None else config.decode("utf-8", "replace"),
        "plan": read_json(run.folder / "plan.json", 1 << 20),
        "memory": last["memory"],
        "routing": last["routing"],
        "warnings": warnings(log),
        "samples": sample_rows(log.of("sample"))[-MOST_SAMPLES:],
        "answers": last["answers"],
        "evals": evals(log.of("eval")),
        "marks": resume_marks([*log.of("resume"), *log.of("extend")]),
        "now": time.time(),  # by this machine's clock, as the times of the events
        "start": last["run_start"],
        "end": last["run_end"],
        "profile": is_file(run.folder / PROFILE),
        "checkpoints": checkpoints(run.folder),
        "offset": log.offset,
    }


def command(folder: Path, start: Event) -> str:
    """The command line that started the run, if its first event has it; otherwise an equivalent one."""
    given = start.get("command")
    if isinstance(given, str) and given:
        return given
    return f"graftune train -c {shlex.quote(str(folder / CONFIG))} --out NEW-FOLDER"


def warnings(log: Log) -> list[Document]:
    found = [{"step": step_of(e), "text": str(e.get("text"))} for e in log.of("warning")[-MOST_WARNINGS:]]
    if log.bad:
        lines = "1 line" if log.bad == 1 else f"{log.bad} lines"
        found.append({"step": None, "text": f"{lines} of metrics.jsonl cannot be read as an event"})
    return found


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
