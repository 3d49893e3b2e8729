"""A run from its settings, or from its folder: prepared, locked against a second process, then handed to the loop.

Until the first step a signal leaves nothing behind: what was made for the run is taken away again. A finished run is
recognised by its log, before anything is loaded.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from graftune.config import Config
from graftune.files import FolderLock
from graftune.observe.console import Console
from graftune.training.loop import Callback, Run, TrainResult
from graftune.training.prepare import prepare_resume, prepare_run, removed_unless_started
from graftune.training.resume import finished, stored_config
from graftune.training.signals import Stopped, raised_signals


def train(
    config: Config,
    *,
    console: Console | None = None,
    resume: str | None = None,
    overrides: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """A whole run in a folder of its own, or (`resume`) what is left of one, to which `overrides` may add. `callbacks`
    get every event of its log."""
    console = console or Console()
    with ExitStack() as held:
        try:
            with raised_signals():
                if resume is not None:
                    run = _resumed(Path(resume), console, overrides or {}, held, callbacks)
                    if isinstance(run, TrainResult):
                        return run
                else:
                    with removed_unless_started() as made:
                        prepared = prepare_run(config, console, made, held)
                        with console.working("preparing the first step"):
                            run = Run(prepared, console, callbacks)
                            run.start()
        except Stopped as stopped:
            folder = Path(resume or config.run.out)
            return TrainResult(folder, 0, "interrupted", None, None, {}, stopped.number, started=False)
        return run.go()


def _resumed(
    folder: Path, console: Console, overrides: dict[str, Any], held: ExitStack, callbacks: Sequence[Callback]
) -> Run | TrainResult:
    """The run, ready to go on; or what it came to, if it is finished and nothing new is asked of it."""
    before, now = stored_config(folder, {}), stored_config(folder, overrides)
    end = finished(folder, before, now)
    if end is not None:
        more = math.floor(now.train.epochs) + 3
        console.note(
            f"this run is finished ({end['stopped']} at step {end.get('step')}); to train it further, say how long it "
            f"should be in all, as in: graftune train --resume {shlex.quote(str(folder))} --epochs {more}"
        )
        losses = found if isinstance(found := end.get("validation_loss"), dict) else {}
        return TrainResult(folder, end.get("step", 0), end["stopped"], losses.get("start"), losses.get("best"))
    lock = held.enter_context(FolderLock(folder))
    if lock.unsupported:
        console.warn(f"{folder}: not locked against a second process ({lock.unsupported})")
    prepared = prepare_resume(now, console, folder, before)
    with console.working("resuming the run"):
        run = Run(prepared, console, callbacks)
        run.resume()
    return run
