"""Starts a run from its settings, or resumes one from its folder: prepares it, locks it against a second process, and
calls the trainer.

A signal before the first step leaves nothing behind: what was made for the run is removed again. A finished run is
recognised by its log, before anything is loaded.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from graftune.errors import GraftuneError
from graftune.io.lock import FolderLock
from graftune.observe.console import Console
from graftune.observe.events import Event, number
from graftune.observe.trackers import check_installed
from graftune.ranks import Ranks, from_environment
from graftune.settings.config import Config
from graftune.training.folder import complete, new_folder, sweep
from graftune.training.prepare import prepare_run
from graftune.training.ranks import SingleProcess, joined
from graftune.training.resume import finished, stored_config
from graftune.training.run import Callback, Run, TrainResult
from graftune.training.signals import Stopped, noted_signals, raised_signals
from graftune.training.trainer import Trainer


class RunKind(NamedTuple):
    """How a run is prepared, and the class that runs it."""

    prepare: Callable[..., Any]
    run: Callable[..., Run]


TRAINING = RunKind(prepare_run, Trainer)


def train(
    config: Config,
    *,
    console: Console | None = None,
    resume: str | None = None,
    overrides: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    kind: RunKind = TRAINING,
) -> TrainResult:
    """Train a whole run in a folder of its own, or (`resume`) what is left of one, with `overrides` of its settings.
    `callbacks` get every event of its log."""
    started, track = from_environment(), (overrides or {}).get("track", config.run.track)
    console = console or Console()
    console.ignore_broken_pipes()
    if started is None:
        check_installed(track)
        return _train(config, console, resume, overrides or {}, callbacks, SingleProcess(), kind)
    if not started.leads:
        console, callbacks = Console(silent=True), ()
    with joined(started, console) as ranks:
        given = config.flat() if resume is None else overrides or {}
        ranks.same({"resume": resume, **given}, "start every rank with the same command line and the same files")
        check_installed(track)
        if resume is None:
            restarted = ranks.restarted
            resume = ranks.from_lead(lambda: found_again(config, started, restarted))
            # found_again has compared the settings with those of the folder.
            overrides = {} if resume is not None else overrides
        result = _train(config, console, resume, overrides or {}, callbacks, ranks, kind)
        if result.signal and not result.started:
            ranks.stopped(result.signal)
        with noted_signals(lambda _: None, once=True):  # nothing is left to stop
            ranks.until_done()
    return result


def _train(
    config: Config,
    console: Console,
    resume: str | None,
    overrides: dict[str, Any],
    callbacks: Sequence[Callback],
    ranks: SingleProcess,
    kind: RunKind,
) -> TrainResult:
    with ExitStack() as held:
        try:
            with raised_signals(once=ranks.world is not None):
                if resume is not None:
                    run = _resumed(Path(resume), console, overrides, held, callbacks, ranks, kind)
                    if isinstance(run, TrainResult):
                        return run
                else:
                    ranks.set_deadline(config.run.deadline)
                    with ExitStack() as made:
                        ranks.at_end(made.close)
                        make_folder = partial(new_folder, made=made, held=held)
                        prepared = kind.prepare(config, console, held, make_folder, ranks)
                        with console.working("preparing the first step"):
                            run = kind.run(prepared, console, callbacks)
                            run.start()
                        made.pop_all()
        except Stopped as stopped:
            for note in getattr(stopped, "__notes__", ()):  # such as the row of the data whose rendering does not end
                console.note(f"interrupted {note}")
            folder = Path(resume or config.run.out)
            return TrainResult(folder, 0, "interrupted", None, None, {}, stopped.number, started=False)
        return run.go()


def found_again(config: Config, ranks: Ranks, restarted: bool) -> str | None:
    """The folder of the run that this command had begun before the launcher restarted it; None at a first start."""
    if ranks.max_restarts and not config.run.out:
        raise GraftuneError("the launcher may start this run again, and would not find it", fix="set out to its folder")
    folder = Path(config.run.out)
    if not restarted or not (folder / "config.yaml").exists():
        return None
    default, stored = Config().flat(), Config.of_run(folder).flat()
    asked = {name: value for name, value in config.flat().items() if value != default[name]}
    if asked.get("tokens_per_micro_batch", 0) < stored["tokens_per_micro_batch"]:
        asked.pop("tokens_per_micro_batch", None)  # a long example had made it larger
    stored_config(folder, asked)
    return str(folder)


def result_of(folder: Path, end: Event) -> TrainResult:
    """The result of a finished run, from the last event of its log."""
    losses = found if isinstance(found := end.get("validation_loss"), dict) else {}
    step = end["step"] if type(end.get("step")) is int else 0
    return TrainResult(folder, step, end["stopped"], number(losses.get("start")), number(losses.get("best")))


def _resumed(
    folder: Path,
    console: Console,
    overrides: dict[str, Any],
    held: ExitStack,
    callbacks: Sequence[Callback],
    ranks: SingleProcess,
    kind: RunKind,
) -> Run | TrainResult:
    """The run, ready to go on; or its result, if it is finished and nothing new is asked of it."""

    def read() -> list[Any]:
        before, now = stored_config(folder, {}), stored_config(folder, overrides)
        return [before.flat(), now.flat(), finished(folder, before, now)]

    was, asked, end = ranks.from_lead(read)
    before, now = Config.of(was), Config.of(asked)
    ranks.set_deadline(now.run.deadline)
    if end is not None:
        if ranks.leads:
            complete(folder, console)
        more = math.floor(now.train.epochs) + 3
        result = result_of(folder, end)
        console.note(
            f"this run is finished ({result.stopped} at step {result.steps}); to train it further, say how long it "
            f"should be in all, as in: graftune train --resume {shlex.quote(str(folder))} --epochs {more}"
        )
        return result
    if ranks.leads:
        lock = held.enter_context(FolderLock(folder))
        if lock.unsupported:
            console.warn(f"{folder}: not locked against a second process ({lock.unsupported})")
        sweep(folder)
    prepared = kind.prepare(now, console, held, lambda config, data: folder, ranks, before)
    with console.working("resuming the run"):
        run = kind.run(prepared, console, callbacks)
        run.resume()
    return run
