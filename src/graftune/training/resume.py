"""Starts a run in its folder, new or resumed: writes the first files, compares a resumed run with its folder, stores
the settings that a resume changes, reports, and computes the number of steps.

Everything that decides what a run computes is stored with it: as settings in config.yaml, as digests of data, base and
examples in its log and checkpoints. A resume compares them by name. Rejected: one digest over all settings, which a new
field or default of a later version would break, and which cannot name what differs.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graftune import __version__
from graftune.data.loader import Loader
from graftune.data.pack import Capacities
from graftune.data.summary import counted
from graftune.errors import GraftuneError, one_line
from graftune.io import digest
from graftune.io.files import write_file
from graftune.observe.events import BEGINNINGS, Event, read_events
from graftune.observe.memory import human_bytes
from graftune.plan import Plan
from graftune.session import SessionParts
from graftune.settings import auto
from graftune.settings.config import Config, leaves
from graftune.settings.sections import OptimConfig, Resume, TrainConfig
from graftune.settings.sources import absolute
from graftune.step.schedule import learning_rate
from graftune.training.checkpoints import Checkpoints
from graftune.training.hooks import RunState
from graftune.training.user_function import FunctionName
from graftune.weights import checkpoint
from graftune.weights.base import Base
from graftune.weights.checkpoint import Identity


@dataclass(frozen=True)
class Length:
    """A run in optimizer steps. The last of its epochs may end early."""

    epoch_steps: tuple[int, ...]
    total: int


def run_length(steps_per_epoch: Callable[[int], int], settings: TrainConfig) -> Length:
    steps = tuple(map(steps_per_epoch, range(math.ceil(settings.epochs))))
    planned, part = sum(steps), settings.epochs % 1
    if part:
        planned += max(1, math.floor(part * steps[-1] + 0.5)) - steps[-1]
    return Length(steps, min(settings.max_steps or planned, planned))


def stretched(settings: TrainConfig, loader: Loader) -> float:
    """The epochs that max_steps needs, if the setting `epochs` is too low for it."""
    epochs = math.ceil(settings.epochs)
    steps = sum(loader.steps_per_epoch(epoch) for epoch in range(epochs))
    if run_length(loader.steps_per_epoch, settings).total >= settings.max_steps:
        return settings.epochs
    while steps < settings.max_steps:
        steps += loader.steps_per_epoch(epochs)
        epochs += 1
    return float(epochs)


def settings_that(*resume: Resume) -> list[str]:
    """The names of the settings that settings/sections.py declares with one of these `resume` kinds."""
    return [leaf.name for leaf in leaves() if leaf.resume in resume]


def stored_config(folder: Path, overrides: dict[str, Any]) -> Config:
    """The settings of a run with `overrides`. Refuses, by name, to change one that a resume may not change."""
    config = Config.of_run(folder)
    stored, asked = config.flat(), with_full_paths(Config.of(config.flat(), overrides)).flat()
    free = settings_that("stored", "free")
    for name in overrides:
        was, now = stored[name], asked[name]
        if name == "device":  # another GPU is allowed
            was, now = was.partition(":")[0], now.partition(":")[0]
        if was != now and name not in free:
            raise GraftuneError(
                f"{name} was {stored[name]!r} in this run and is {asked[name]!r} now",
                where=str(folder),
                fix="resume without it, or start a new run",
            )
    if asked["epochs"] != stored["epochs"] and "max_steps" not in overrides:
        asked["max_steps"] = 0  # the new number of epochs replaces it
    return Config.of(asked)


def with_full_paths(config: Config) -> Config:
    """The settings with full paths of files and folders, so that a run can be resumed from anywhere."""
    values = {name: value for name, value in config.flat().items() if name in ("base", "template", "adapter") and value}
    paths = {name: Path(v).expanduser() for name, v in values.items() if v not in ("auto", "none")}
    full: dict[str, Any] = {name: str(path.resolve()) for name, path in paths.items() if path.exists()}
    if ":" in config.run.metric:
        full["metric"] = str(FunctionName.of(config.run.metric, "metric"))
    if config.rl.reward:
        full["reward"] = [str(FunctionName.of(text)) for text in config.rl.reward]
    return config.replace(**full, data=absolute(config.data.data), eval_data=absolute(config.data.eval_data))


def finished(folder: Path, before: Config, now: Config) -> Event | None:
    """The last event of a run that has nothing left to do; None if it has."""
    changed = any(
        getattr(before.train, name) != getattr(now.train, name) for name in ("epochs", "max_steps", "patience")
    )
    product = folder / ("adapter" if now.train.method == "lora" else "model")
    log = folder / "metrics.jsonl"
    if changed or not product.is_dir() or not log.exists():
        return None
    kinds = ("run_start", "resume", "run_end")
    lives = [e for e in read_events(log) if e["event"] in kinds]
    ended = bool(lives) and lives[-1]["event"] == "run_end" and lives[-1].get("stopped") in ("finished", "early stop")
    return lives[-1] if ended else None


def extension(step: int, before: int, now: int, optim: OptimConfig) -> str:
    """How another length changes the schedule, in one line."""
    if step >= now:
        return f"the run now ends at step {now} instead of {before}: there is nothing left to train"
    lr, had = learning_rate(step, now, optim), learning_rate(min(step, before - 1), before, optim)
    verb = "extended" if now > before else "shortened"
    return (
        f"{verb} from {before} to {now} steps: from step {step + 1} on the {optim.schedule} schedule is the one over "
        f"{now} steps, so the learning rate goes on at {lr:.2e} (it was {had:.2e}) and ends at "
        f"{learning_rate(now - 1, now, optim):.2e}"
    )


def identity(config: Config, base: Base, data: str, examples: str) -> dict[str, Any]:
    """What must be the same for a checkpoint to fit: digests, and the settings by name."""
    flat = config.flat()
    settings = {name: flat[name] for name in settings_that("fixed")}
    settings["device"] = str(settings["device"]).partition(":")[0]  # which GPU it is changes nothing
    return {
        "format": checkpoint.FORMAT,
        "data": data,
        "tokenizer or template": examples,
        "base": f"{base.sha256}-{hashlib.sha256(repr(base.spec).encode()).hexdigest()}",
        "settings": settings,
    }


def find_checkpoint(
    folder: Path, identity: Identity, epoch_steps: Sequence[int], warn: Callable[[str], None]
) -> Path | None:
    """The checkpoint that a resume goes on from; None if there is none. A run that was started with other inputs is
    refused here, before anything is written to its log."""
    found, log = checkpoint.newest_whole(folder / "checkpoints", identity, epoch_steps, warn), folder / "metrics.jsonl"
    if found is None and log.exists():
        starts = [event for event in read_events(log) if event["event"] == "run_start"]
        if starts:
            checkpoint.check_identity(identity, starts[-1], folder)
    return found


def write_start(
    state: RunState,
    examples: int,
    plan: Plan | None,
    identity: Identity,
    shape: Capacities | None = None,
    encoded: str = "",
) -> None:
    """Write a new folder: the log's first line, the plan and, last, the configuration, which makes it a run.
    `examples`: records to train on; `encoded`: the key of the encoded data, where it is stored."""
    parts = state.parts
    if state.ranks.leads:
        facts: dict[str, Any] = {"command": typed_command(), **computed_by(parts)}
        facts |= {"examples": examples, "encoded": encoded, "functions": functions_of(state.config)}
        trainable = len(parts.arena.weights)
        state.report.log.emit("run_start", **facts, **identity, steps=state.total, trainable=trainable)
        if plan is not None:
            write_file(state.folder / "plan.json", json.dumps(plan.document(), indent=1) + "\n")
        state.config.save(state.folder / "config.yaml")
    _report_start(state, shape)
    if few := "" if state.config.rl.reward else auto.warning(state.config, state.total, examples):
        state.report.warn(few)


def resume_folder(
    state: RunState, checkpoints: Checkpoints, found: Path | None, before: Length, shape: Capacities | None
) -> None:
    """Load the checkpoint that was found on rank 0 and share it with the others. `before`: the run's length so far."""
    events: list[Event] = []
    if state.ranks.leads:
        events = _read_folder(state, checkpoints, found, before, shape)
    state.progress = state.ranks.spread(state.parts, state.progress)
    for hook in state.hooks:
        hook.resumed(state, events)


def _read_folder(
    state: RunState, checkpoints: Checkpoints, found: Path | None, before: Length, shape: Capacities | None
) -> list[Event]:
    """The events of the log, after the checkpoint was loaded and the resume was logged."""
    report, console = state.report, state.report.console
    if found is not None:
        checkpoints.restore(state, found)
    events = read_events(state.folder / "metrics.jsonl")
    now = computed_by(state.parts)
    changes = changed_since(now, events)
    functions = functions_of(state.config)
    edited = edited_since(functions, events)
    report.log.emit("resume", step=state.progress.step, **now, functions=functions)
    _report_start(state, shape)
    where = f"step {state.progress.step}" if found else "the beginning: no checkpoint had been written"
    console.note(f"resuming {state.folder} at {where}")
    for text in filter(None, (changes, edited)):
        report.warn(text, state.progress.step)
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


def computed_by(parts: SessionParts) -> dict[str, str]:
    """Versions, device and attention backend: they decide the last bits of a run's numbers. Logged at every start."""
    runtime = parts.runtime
    on_cpu = {"cpu": torch.backends.cpu.get_cpu_capability()} if runtime.device.type == "cpu" else {}
    versions = {"graftune": __version__, "torch": str(torch.__version__)}
    return versions | {"device": runtime.describe(why=False), "attention": parts.attention.backend} | on_cpu


def changed_since(now: dict[str, str], events: Sequence[Event]) -> str:
    """The differences to `computed_by` at the run's last start, in one line; empty if there are none."""
    before = _last_start(events)
    was = {name: str(before[name]) for name in now if name in before}
    changes = [
        f"{name} was {one_line(text, 200)} and is {now[name]}" for name, text in was.items() if text != now[name]
    ]
    if not changes:
        return ""
    return f"{'; '.join(changes)}: the run goes on, and from here on its figures may differ in their last bits"


def _last_start(events: Sequence[Event]) -> Event:
    """What was logged at the run's starts, the latest value of each key."""
    starts = (event for event in events if event["event"] in BEGINNINGS)
    return {name: value for event in starts for name, value in event.items()}


def functions_of(config: Config) -> dict[str, str]:
    """The user's functions that a run calls, with digests of their files. Logged at every start."""
    found = [FunctionName.of(text) for text in config.rl.reward]
    found += [FunctionName.of(config.run.metric, "metric")] if ":" in config.run.metric else []
    return {f"{one.path}:{one.name}": digest.sha256([one.path]) for one in found}


def edited_since(now: dict[str, str], events: Sequence[Event]) -> str:
    """Which of these functions were edited since the run's last start, in one line; empty if none was."""
    before = _last_start(events).get("functions", {})
    edited = [name for name, sha256 in now.items() if before.get(name, sha256) != sha256]
    if not edited:
        return ""
    return f"the file of {' and '.join(edited)} was edited: later numbers may not be comparable with earlier ones"


def typed_command() -> str:
    """The command line that started this process; empty where Python code called `train`."""
    program = Path(sys.argv[0] if sys.argv else "")
    ours = program.name == "graftune" or (program.name == "__main__.py" and program.parent.name == "graftune")
    return shlex.join(["graftune", *sys.argv[1:]]) if ours else ""


def _report_start(state: RunState, shape: Capacities | None) -> None:
    """Print base, device, sizes and schedule before the first step. `shape`: of every micro-batch, if it is fixed."""
    parts, console = state.parts, state.report.console
    spec, arena, settings = parts.base.spec, parts.arena, parts.config.train
    console.note(f"base: {parts.base.name} ({spec.family}, {spec.parameters / 1e6:.0f}M parameters)")
    console.note(f"device: {parts.runtime.describe()}")
    console.note(f"attention: {parts.attention.backend} ({parts.attention.why})")
    console.note(f"frozen weights: {parts.placement.describe()}")
    console.note(
        f"trained: {len(arena.weights) / 1e6:.2f}M values, {human_bytes(arena.nbytes)} with gradients and moments"
    )
    ranks = f", divided among {parts.share.size} ranks" if parts.share.size > 1 else ""
    rl, each = parts.config.rl, f"up to {settings.tokens_per_step} tokens"
    if rl.reward:
        each = f"{rl.group} answers to each of up to {rl.prompts_per_round} prompts"
    console.note(
        f"{counted(state.total, 'step')} of {each} in micro-batches of "
        f"{settings.tokens_per_micro_batch}{ranks}, learning rate {parts.config.optim.peak_lr:g}; "
        f"run folder {state.folder}"
    )
    if shape is not None:
        how = "replayed from CUDA graphs" if settings.graph else "not captured (graph is off)"
        console.note(
            f"shape: {shape.capacity} tokens, {shape.max_docs} documents of up to {shape.longest}, "
            f"{shape.max_rows} response rows; steps are {how}"
        )
