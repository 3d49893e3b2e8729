"""The start of a run in its folder, new or resumed: what is written, compared and reported before the first step."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from graftune import __version__
from graftune.data.pack import Capacities
from graftune.data.summary import counted
from graftune.errors import one_line
from graftune.io.files import write_file
from graftune.observe.events import BEGINNINGS, Event, read_events
from graftune.observe.memory import human_bytes
from graftune.session import Parts
from graftune.settings.config import Config
from graftune.training.checkpoints import Checkpoints
from graftune.training.hooks import RunState
from graftune.training.prepare import Prepared
from graftune.training.resume import Length, extension, settings_that
from graftune.weights import checkpoint
from graftune.weights.checkpoint import Identity


def write(state: RunState, prepared: Prepared, identity: Identity, shape: Capacities | None) -> None:
    """Write a new folder: the log's first line, the plan and, last, the configuration, which makes it a run."""
    session = state.session
    if state.ranks.leads:
        facts: dict[str, Any] = {"command": typed_command(), **computed_by(session)}
        training = prepared.training
        facts |= {"examples": len(training), "encoded": training.examples.store.header.get("key", "")}
        trainable = len(session.arena.weights)
        state.report.log.emit("run_start", **facts, **identity, steps=state.total, trainable=trainable)
        if prepared.plan is not None:
            write_file(state.folder / "plan.json", json.dumps(prepared.plan.document(), indent=1) + "\n")
        state.config.save(state.folder / "config.yaml")
    _report_start(state, shape)


def resume(state: RunState, checkpoints: Checkpoints, before: Length, shape: Capacities | None) -> None:
    """Load the newest checkpoint on rank 0 and share it with the others. `before`: the run's length so far."""
    events: list[Event] = []
    if state.ranks.leads:
        events = _read_folder(state, checkpoints, before, shape)
    state.progress = state.ranks.spread(state.session, state.progress)
    for hook in state.hooks:
        hook.resumed(state, events)


def _read_folder(state: RunState, checkpoints: Checkpoints, before: Length, shape: Capacities | None) -> list[Event]:
    """The events of the log, after the checkpoint was loaded and the resume was logged."""
    report, console = state.report, state.report.console
    found = checkpoints.restore(state, before.epoch_steps)
    events = read_events(state.folder / "metrics.jsonl")
    starts = [event for event in events if event["event"] == "run_start"]
    if not found and starts:
        checkpoint.check_identity(checkpoints.identity, starts[-1], state.folder)
    now = computed_by(state.session)
    changes = changed_since(now, events)
    report.log.emit("resume", step=state.progress.step, **now)
    _report_start(state, shape)
    where = f"step {state.progress.step}" if found else "the beginning: no checkpoint had been written"
    console.note(f"resuming {state.folder} at {where}")
    if changes:
        report.warn(changes, state.progress.step)
    _keep_changes(state, checkpoints, before)
    return events


def _keep_changes(state: RunState, checkpoints: Checkpoints, before: Length) -> None:
    """Report, log and store the settings that this resume changes for good."""
    p, report, stored, now = state.progress, state.report, Config.of_run(state.folder), state.config.flat()
    kept = {name: now[name] for name in settings_that("stored") if stored.flat()[name] != now[name]}
    if state.total != before.total:
        report.console.note(extension(p.step, before.total, state.total, state.config.optim))
        report.log.emit("extend", step=p.step, steps=state.total, steps_before=before.total, **kept)
        if p.stale and state.total > before.total:  # or an early stop would come again at once
            p.stale = 0
            checkpoints.save(state)
    if kept:
        stored.replace(**kept).save(state.folder / "config.yaml")


def computed_by(session: Parts) -> dict[str, str]:
    """What else decides the last bits of a run's numbers: versions, device and attention. Logged at every start."""
    runtime = session.runtime
    on_cpu = {"cpu": torch.backends.cpu.get_cpu_capability()} if runtime.device.type == "cpu" else {}
    versions = {"graftune": __version__, "torch": str(torch.__version__)}
    return versions | {"device": runtime.describe(why=False), "attention": session.attention.backend} | on_cpu


def changed_since(now: dict[str, str], events: Sequence[Event]) -> str:
    """The differences to `computed_by` at the run's last start, in one line; empty if there are none."""
    before: Event = {}
    for event in events:
        if event["event"] in BEGINNINGS:
            before = {**before, **event}
    was = {name: str(before[name]) for name in now if name in before}
    changes = [
        f"{name} was {one_line(text, 200)} and is {now[name]}" for name, text in was.items() if text != now[name]
    ]
    if not changes:
        return ""
    return f"{'; '.join(changes)}: the run goes on, and from here on its figures may differ in their last bits"


def typed_command() -> str:
    """The command line that started this process; empty where Python code called `train`."""
    program = Path(sys.argv[0] if sys.argv else "")
    ours = program.name == "graftune" or (program.name == "__main__.py" and program.parent.name == "graftune")
    return shlex.join(["graftune", *sys.argv[1:]]) if ours else ""


def _report_start(state: RunState, shape: Capacities | None) -> None:
    """Print what was found and chosen, before the first step. `shape`: of every micro-batch, where it is fixed."""
    session, console = state.session, state.report.console
    spec, arena, settings = session.base.spec, session.arena, session.config.train
    console.note(f"base: {session.base.name} ({spec.family}, {spec.parameters / 1e6:.0f}M parameters)")
    console.note(f"device: {session.runtime.describe()}")
    console.note(f"attention: {session.attention.backend} ({session.attention.why})")
    console.note(f"frozen weights: {session.placement.describe()}")
    console.note(
        f"trained: {len(arena.weights) / 1e6:.2f}M values, {human_bytes(arena.nbytes)} with gradients and moments"
    )
    ranks = f", divided among {session.share.size} ranks" if session.share.size > 1 else ""
    console.note(
        f"{counted(state.total, 'step')} of up to {settings.tokens_per_step} tokens in micro-batches of "
        f"{settings.tokens_per_micro_batch}{ranks}; run folder {state.folder}"
    )
    if shape is not None:
        how = "replayed from CUDA graphs" if settings.graph else "not captured (graph is off)"
        console.note(
            f"shape: {shape.capacity} tokens, {shape.max_docs} documents of up to {shape.longest}, "
            f"{shape.max_rows} response rows; steps are {how}"
        )
