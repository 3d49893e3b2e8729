"""What a run that is taken up again keeps, what may be other than before, and how long it is now.

Everything that decides what a run computes is stored with it: as settings in config.yaml, as digests of data, base and
examples in its log and checkpoints. A resume compares them by name. Rejected: one digest over all settings, which a
later version's new field or changed default would break, and which cannot say what differs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from graftune import __version__
from graftune.data.loader import Loader
from graftune.errors import GraftuneError, one_line
from graftune.observe.events import BEGINNINGS, Event, read_events
from graftune.session import Session
from graftune.settings.config import Config, OptimConfig, Resume, TrainConfig, leaves
from graftune.settings.sources import absolute
from graftune.step.schedule import learning_rate
from graftune.weights.base import Base

if TYPE_CHECKING:
    from graftune.training.trainer import Run


@dataclass(frozen=True)
class Length:
    """A run in optimizer steps. The last of its epochs may end early."""

    epoch_steps: tuple[int, ...]
    total: int


def run_length(loader: Loader, settings: TrainConfig) -> Length:
    steps = tuple(loader.steps_per_epoch(epoch) for epoch in range(math.ceil(settings.epochs)))
    planned, part = sum(steps), settings.epochs % 1
    if part:
        planned += max(1, math.floor(part * steps[-1] + 0.5)) - steps[-1]
    return Length(steps, min(settings.max_steps or planned, planned))


def stretched(settings: TrainConfig, loader: Loader) -> float:
    """The epochs that max_steps takes, if those that are set do not suffice."""
    epochs = math.ceil(settings.epochs)
    steps = sum(loader.steps_per_epoch(epoch) for epoch in range(epochs))
    if run_length(loader, settings).total >= settings.max_steps:
        return settings.epochs
    while steps < settings.max_steps:
        steps += loader.steps_per_epoch(epochs)
        epochs += 1
    return float(epochs)


def settings_that(*resume: Resume) -> list[str]:
    """The settings that are declared so in settings/config.py."""
    return [leaf.name for leaf in leaves() if leaf.resume in resume]


def stored_config(folder: Path, overrides: dict[str, Any]) -> Config:
    """A run's own settings, with those that may change on a resume; any other change is refused by name."""
    if not (folder / "config.yaml").exists():
        raise GraftuneError("holds no run (no config.yaml)", where=str(folder), fix="give the folder of a run")
    config = Config.of_run(folder)
    stored, asked = config.flat(), with_full_paths(Config.of(config.flat(), overrides)).flat()
    free = settings_that("stored", "free")
    for name in overrides:
        if asked[name] != stored[name] and name not in free and not _same_kind(name, asked, stored):
            raise GraftuneError(
                f"{name} was {stored[name]!r} in this run and is {asked[name]!r} now",
                where=str(folder),
                fix="resume without it, or start a new run",
            )
    if asked["epochs"] != stored["epochs"] and "max_steps" not in overrides:
        asked["max_steps"] = 0  # of the two, the one that is given decides
    return Config.of(asked)


def _same_kind(name: str, asked: dict[str, Any], stored: dict[str, Any]) -> bool:
    """Another GPU of the same machine or of another one."""
    return name == "device" and str(asked[name]).partition(":")[0] == str(stored[name]).partition(":")[0]


def with_full_paths(config: Config) -> Config:
    """Files and folders of the user's by their full path, so that a run can be resumed from anywhere."""
    values = {name: value for name, value in config.flat().items() if name in ("base", "template", "adapter") and value}
    full: dict[str, Any] = {n: str(Path(v).expanduser().resolve()) for n, v in values.items() if _exists(v)}
    return config.replace(**full, data=absolute(config.data.data), eval_data=absolute(config.data.eval_data))


def _exists(value: str) -> bool:
    return Path(value).expanduser().exists() and value not in ("auto", "none")


def finished(folder: Path, before: Config, now: Config) -> Event | None:
    """The end of a run that has nothing left to do, from its log; None if it has."""
    changed = any(
        getattr(before.train, name) != getattr(now.train, name) for name in ("epochs", "max_steps", "patience")
    )
    product = folder / ("adapter" if now.train.method == "lora" else "model")
    log = folder / "metrics.jsonl"
    if changed or not product.is_dir() or not log.exists():
        return None
    kinds = ("run_start", "resume", "run_end")
    lives = [e for e in read_events(log, kinds=kinds) if e["event"] in kinds]
    ended = bool(lives) and lives[-1]["event"] == "run_end" and lives[-1].get("stopped") in ("finished", "early stop")
    return lives[-1] if ended else None


def extension(step: int, before: int, now: int, optim: OptimConfig) -> str:
    """What another length does to the schedule, in one line."""
    if step >= now:
        return f"the run now ends at step {now} instead of {before}: there is nothing left to train"
    lr, had = learning_rate(step, now, optim), learning_rate(min(step, before - 1), before, optim)
    verb = "extended" if now > before else "shortened"
    return (
        f"{verb} from {before} to {now} steps: from step {step + 1} on the {optim.schedule} schedule is the one over "
        f"{now} steps, so the learning rate goes on at {lr:.2e} (it was {had:.2e}) and ends at "
        f"{learning_rate(now - 1, now, optim):.2e}"
    )


def keep_changes(run: Run) -> None:
    """What was changed with this resume and holds from now on: said, logged and stored."""
    p, before, now = run.progress, Config.of_run(run.folder), run.config.flat()
    kept = {name: now[name] for name in settings_that("stored") if before.flat()[name] != now[name]}
    if run.total != run.before.total:
        run.console.note(extension(p.step, run.before.total, run.total, run.config.optim))
        run.log.emit("extend", step=p.step, steps=run.total, steps_before=run.before.total, **kept)
        if p.stale and run.total > run.before.total:  # or an early stop would come again at once
            p.stale = 0
            run.save()
    if kept:
        before.replace(**kept).save(run.folder / "config.yaml")


def computed_by(session: Session) -> dict[str, str]:
    """What else decides the last bits of what a run computes; in its log at every start."""
    runtime = session.runtime
    on_cpu = {"cpu": torch.backends.cpu.get_cpu_capability()} if runtime.device.type == "cpu" else {}
    versions = {"graftune": __version__, "torch": str(torch.__version__)}
    return versions | {"device": runtime.describe(why=False), "attention": session.attention.backend} | on_cpu


def changed_since(now: dict[str, str], events: Sequence[Event]) -> str:
    """What computes the run now and did not when it was last at work, in one line; empty if nothing changed."""
    before: Event = {}
    for event in events:
        if event["event"] in BEGINNINGS:
            before = {**before, **event}
    was = {name: str(before[name]) for name in now if name in before}
    # Earlier versions also noted why a device was chosen, in brackets behind it, and that changes no bit.
    changes = [
        f"{name} was {one_line(text, 200)} and is {now[name]}"
        for name, text in was.items()
        if text != now[name] and not text.startswith(f"{now[name]} (")
    ]
    if not changes:
        return ""
    return f"{'; '.join(changes)}: the run goes on, and from here on its figures may differ in their last bits"


def check_longer(folder: Path, step: int, total: int, settings: TrainConfig) -> None:
    if total < step:
        asked = f"max_steps {settings.max_steps}" if settings.max_steps else f"epochs {settings.epochs:g}"
        raise GraftuneError(
            f"the run has done {step} {'step' if step == 1 else 'steps'} and {asked} makes {total}",
            where=str(folder),
            fix=f"give more, or take an earlier state as in {folder}@best with chat, eval or export",
        )


def identity(config: Config, base: Base, data: str, examples: str) -> dict[str, Any]:
    """What must be the same for a checkpoint to fit: digests, and the settings by name."""
    flat = config.flat()
    settings = {name: flat[name] for name in settings_that("fixed")}
    settings["device"] = str(settings["device"]).partition(":")[0]  # which of several GPUs it is decides nothing
    spec = json.dumps(beyond_defaults(base.spec), sort_keys=True)
    return {
        "data": data,
        "tokenizer or template": examples,
        "base": f"{base.sha256}-{hashlib.sha256(spec.encode()).hexdigest()}",
        "settings": settings,
    }


def beyond_defaults(value: Any) -> Any:
    """A dataclass as the fields that are not at their default: a field that a later version adds changes nothing for
    what does not use it."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [beyond_defaults(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    found = {}
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if default is dataclasses.MISSING or held != default:
            found[field.name] = beyond_defaults(held)
    return found
