"""Checkpoints of a run: after each evaluation and epoch, every `save_every` steps, and by the clock."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from graftune.errors import GraftuneError
from graftune.step.evaluate import EvalResult
from graftune.training.hooks import Hook, RunState
from graftune.weights import checkpoint
from graftune.weights.checkpoint import Identity


class Checkpoints(Hook):
    """Writes checkpoints on rank 0; the other ranks wait in their next step."""

    def __init__(self, folder: Path, identity: Identity):
        """`identity`: what must be the same for a checkpoint to be resumed from."""
        self.folder, self.identity = folder, identity
        self.saved = -1  # the step of the last checkpoint
        self.tried = -1  # the step that was last saved, or skipped because it is not finite
        self.saved_at = _minutes()
        self.nonfinite_reported = False

    def overdue(self, state: RunState) -> bool:
        """Whether `save_minutes` have passed since the last checkpoint."""
        minutes, step = state.config.train.save_minutes, state.progress.step
        if not minutes or not step or step == self.tried or not state.ranks.leads:
            return False
        return _minutes() - self.saved_at >= minutes

    def due(self, state: RunState) -> bool:
        step, every = state.progress.step, state.config.train.save_every
        if not 0 < step < state.total or step == self.tried:  # the end of a run saves by itself
            return False
        return state.epoch_ends or (every > 0 and step % every == 0) or self.overdue(state)

    def run(self, state: RunState) -> None:
        self.save(state)

    def evaluated(self, state: RunState, result: EvalResult) -> None:
        self.save(state)

    def save(self, state: RunState) -> None:
        """Save the last step. All steps must have finished, so that the log has every step that a checkpoint holds.
        Weights that are not finite are not saved, so that they replace no earlier checkpoint."""
        p, parts = state.progress, state.parts
        p.updates, self.tried = int(parts.step.count), p.step
        p.own_shape = parts.own_shape
        if not state.ranks.leads:
            return
        if not checkpoint.is_sound(parts.arena):
            if not self.nonfinite_reported:
                text = f"the trainable weights contain NaN or Inf at step {p.step}; the checkpoint was skipped"
                state.report.warn(text, p.step)
            self.nonfinite_reported = True
            return
        with state.ranks.busy("writing a checkpoint"), state.pausing_steps("checkpoint"):
            state.report.log.sync()
            checkpoint.save(self.folder, parts.arena, p, self.identity, parts.step.scaler)
            checkpoint.prune(self.folder, state.config.train.keep_last, p.best_step)
        self.saved, self.saved_at = p.step, _minutes()
        state.report.live_plot.update()

    def restore(self, state: RunState, found: Path) -> None:
        place, _ = checkpoint.read_state(found)
        if state.total < place.step:
            settings, done = state.config.train, f"{place.step} {'step' if place.step == 1 else 'steps'}"
            asked = f"max_steps {settings.max_steps}" if settings.max_steps else f"epochs {settings.epochs:g}"
            raise GraftuneError(
                f"the run has done {done} and {asked} makes {state.total}",
                where=str(state.folder),
                fix=f"give more, or take an earlier state as in {state.folder}@best with chat, eval or export",
            )
        parts = state.parts
        state.progress = checkpoint.load(found, parts.arena, parts.step.scaler)
        parts.step.count.fill_(state.progress.updates)
        parts.own_shape = state.progress.own_shape
        self.saved = self.tried = state.progress.step
        if found == checkpoint.latest(self.folder):  # else pruning might remove `found` itself
            checkpoint.prune(self.folder, state.config.train.keep_last, state.progress.best_step)

    def take_best(self, state: RunState) -> None:
        """Put the weights that were best on validation into the arena."""
        p = state.progress
        if p.best_step < 0 or p.best_step == p.step:
            return
        best = checkpoint.steps(self.folder).get(p.best_step)
        if best is None:
            raise GraftuneError(
                f"the checkpoint of step {p.best_step}, the best one, is gone",
                where=str(self.folder),
                fix="restore it, or start a new run",
            )
        state.parts.arena.weights.copy_(checkpoint.weights_of(best))
        state.parts.arena.publish()
        state.report.console.note(f"keeping step {p.best_step}, the best on validation")

    def lost(self, state: RunState) -> str:
        """What the run loses if it ends now, and how to resume it."""
        again = f"go on with: {resume_command(state.folder)}"
        if self.saved < 0:
            return f"no checkpoint has been written, so the run begins anew; {again}"
        count = state.progress.step - self.saved
        what = "nothing is lost" if count <= 0 else "1 step is lost" if count == 1 else f"{count} steps are lost"
        return f"the last checkpoint is that of step {self.saved}, {what}; {again}"


def resume_command(folder: Path) -> str:
    return f"graftune train --resume {shlex.quote(str(folder))}"


def _minutes() -> float:
    return time.monotonic() / 60
