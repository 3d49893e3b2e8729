"""What a run is watched by while it trains: live speed, profiled steps, a tracker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graftune.data.dataset import Dataset
from graftune.data.encoded import lengths_of
from graftune.data.pack import Capacities
from graftune.observe.console import Console
from graftune.observe.trackers import Tracking
from graftune.session import Session
from graftune.settings.config import Config
from graftune.step.flops import StepFlops
from graftune.step.pipeline import BaseLoop
from graftune.training import floors
from graftune.training.prepare import Prepared
from graftune.training.profiled_steps import ProfiledSteps, first_profiled
from graftune.training.reporter import LiveSpeed

if TYPE_CHECKING:
    from graftune.training.trainer import Run


def live_speed(session: Session, training: Dataset, loop: BaseLoop, shape: Capacities | None) -> LiveSpeed:
    full = session.config.train.method != "lora"
    flops = StepFlops.of(session.base.spec, lengths_of(training.examples), full=full)
    if session.runtime.device.type != "cuda":
        return LiveSpeed(flops)
    known = floors.known(session, shape)
    without = f"floor: {floors.lacks_briefly(session) or 'not measured (graftune profile RUN)'}"
    return LiveSpeed(flops, known, "" if known else without, lambda: loop.waited)


def profiled_steps(run: Run) -> ProfiledSteps:
    """Of one process: where several ranks train, capturing once more on one of them would leave the others behind."""
    session, every = run.session, run.config.run.profile_every
    if every and run.ranks.world is not None:
        run.console.warn("profile_every is for one process: the steps of several ranks are not profiled")
        every = 0
    elif every and (first := first_profiled(every, run.progress.step)) > run.total:
        run.console.warn(f"profile_every is {every}: the run ends at step {run.total}, before step {first} is profiled")
    return ProfiledSteps(every, run.folder, run.pipeline, session, run.shape)


def tracking_of(config: Config, prepared: Prepared, console: Console, epoch_steps: Sequence[int]) -> Tracking | None:
    if config.run.track == "none" or not prepared.ranks.leads:
        return None
    return Tracking(config.run.track, Path(prepared.folder), config.flat(), console.warn, epoch_steps)
