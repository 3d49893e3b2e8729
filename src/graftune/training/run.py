"""A run in its folder: sends steps until it ends or is stopped, collects their figures when they arrive, and calls the
hooks. A subclass defines a step: `Trainer` (trainer.py) trains on batches of data, `PolicyRun` (rl/run.py) on answers
that the model samples.

Everything a run does next follows from its `Progress`: which step is next and which evaluation was last. So a run that
was killed anywhere goes on from its last checkpoint and computes, bit for bit, what it would have computed. Signals are
noticed between micro-batches; gradients since the last update are dropped, and the last whole step is saved.

`Progress.step` counts the steps that were sent. Their figures come when they are done, on a GPU a step or two later;
before an evaluation, a checkpoint and the end the loop waits for all of them, so that the log has every step that a
checkpoint holds.
"""

from __future__ import annotations

import os
import signal
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graftune.data.pack import Capacities
from graftune.observe.console import Console
from graftune.observe.events import Event, EventLog
from graftune.observe.memory import peak_resident_bytes
from graftune.observe.trackers import Tracking
from graftune.plan import Plan
from graftune.session import SessionParts
from graftune.settings.config import Config
from graftune.spans import marked
from graftune.step.pipeline import Figures
from graftune.training.checkpoints import Checkpoints
from graftune.training.guard import Guard, Halted
from graftune.training.hooks import RunState
from graftune.training.ranks import SingleProcess
from graftune.training.reporter import LiveSpeed, Reporter
from graftune.training.resume import find_checkpoint, identity, resume_folder, run_length
from graftune.training.signals import HANGUP, Interrupted, SignalWatch


@dataclass
class TrainResult:
    """The outcome of a run."""

    folder: Path  # with the adapter, the checkpoints and the log
    steps: int  # in all
    stopped: str  # finished, early stop or interrupted
    first_eval: float | None  # the validation loss before the first step
    best_eval: float | None  # the lowest one since
    summary: dict[str, Any] = field(default_factory=dict)  # the figures of the log's last event
    signal: int = 0  # the signal that interrupted it; 0: none
    started: bool = True  # False: stopped while it was prepared, with nothing written


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready for its first step."""

    folder: Path
    parts: SessionParts
    plan: Plan | None  # where memory is planned: on CUDA and on CPUs
    before: Config | None  # the settings so far of a run that is resumed
    ranks: SingleProcess


Callback = Callable[[Event], object]  # a user's function, which gets every event of the log


class Run(ABC):
    guard: Guard
    evaluates: bool  # whether an evaluation follows the last step, which also saves a checkpoint

    def __init__(
        self,
        prepared: PreparedRun,
        console: Console,
        callbacks: Sequence[Callback],
        steps_per_epoch: Callable[[int], int],
        digests: tuple[str, str],
        shape: Capacities | None = None,
        live: LiveSpeed | None = None,
    ):
        """`digests`: of the data, and of its tokenised examples. A checkpoint with others is not resumed from."""
        parts, ranks, config = prepared.parts, prepared.ranks, prepared.parts.config
        length = self.length_before = run_length(steps_per_epoch, config.train)
        if prepared.before is not None:  # the settings before this resume
            self.length_before = run_length(steps_per_epoch, prepared.before.train)
        same = identity(config, parts.base, *digests)
        self.parts, self.shape, self.callbacks = parts, shape, callbacks
        self.step, self.pipeline = parts.step, parts.pipeline
        self.found: Path | None = None  # the checkpoint to go on from
        if prepared.before is not None and ranks.leads:
            self.found = find_checkpoint(prepared.folder, same, self.length_before.epoch_steps, console.warn)
        log = EventLog(prepared.folder / "metrics.jsonl" if ranks.leads else os.devnull, self._tell_event)
        report = Reporter(console, log, length.total, parts.runtime.device, prepared.plan, live)
        epoch_steps = max(length.epoch_steps, self.length_before.epoch_steps, key=len)
        self.state = RunState(parts, prepared.folder, ranks, report, length.total, epoch_steps)
        self.checkpoints = Checkpoints(prepared.folder / "checkpoints", same)
        self.last: int | None = None  # the step after which all ranks stop, once one of them asks for it
        self.closing = False  # set once all steps are done and saved: no checkpoint is written after that
        track = config.run.track if ranks.leads else "none"
        self.tracking = Tracking(track, prepared.folder, config.flat(), console.warn, epoch_steps)

    @abstractmethod
    def start(self) -> None:
        """Write a new folder: the configuration and the log's first line. From here on the run can be resumed."""

    @abstractmethod
    def _epoch(self) -> None:
        """Take steps until the epoch or the run ends."""

    def resume(self) -> None:
        """Go on in an existing folder from the latest whole checkpoint, or from the beginning if there is none yet."""
        resume_folder(self.state, self.checkpoints, self.found, self.length_before, self.shape)

    def go(self) -> TrainResult:
        state = self.state
        try:
            with self._signal_watch():  # until the last checkpoint is written: a signal is often sent twice
                stopped, summary = self._to_the_end()
        except Halted:
            raise self.guard.halted(state) from None
        finally:
            for hook in state.hooks:
                hook.close(state)
            self.tracking.close()
            state.report.log.close()
        p = state.progress
        return TrainResult(state.folder, p.step, stopped, p.first_loss, p.best_loss, summary, state.stop.signal)

    def _to_the_end(self) -> tuple[str, dict[str, Any]]:
        """Run until the end. Returns how the run ended, and its summary."""
        state = self.state
        try:
            stopped = self._train()
            if not self.evaluates:  # else the last evaluation was saved
                self.checkpoints.save(state)
            self.closing = True
            state.report.phase("finalising")
            with state.ranks.busy("finishing the run"):
                return stopped, self._finish(stopped)
        except (Interrupted, OSError) as error:
            if isinstance(error, OSError) and not state.stop.signal:
                state.report.console.note(self.checkpoints.lost(state))  # the log or a checkpoint could not be written
                raise
            # Writing to a terminal that is gone fails: the checkpoint comes first, without a message.
            self._save_and_stop()
            return "interrupted", {}

    def _train(self) -> str:
        """Take all steps. Returns why they ended."""
        state = self.state
        try:
            for hook in state.hooks:
                hook.start(state)
            with state.report.steps(state.progress.step):
                self._run_due()
                while not (ended := self._ended()):
                    if state.epoch_ends:
                        state.progress.epoch, state.progress.epoch_step = state.progress.epoch + 1, 0
                    self._epoch()
                self.finish_steps()
                if ended == "finished":  # an early stop follows an evaluation, which has checked the weights
                    self.guard.check_end(state)
                return ended
        finally:
            for hook in state.hooks:
                hook.stop(state)

    def _ended(self) -> str:
        p, patience = self.state.progress, self.parts.config.train.patience
        if p.step >= self.state.total:
            return "finished"
        return "early stop" if patience and p.stale >= patience else ""

    def _run_due(self) -> None:
        """Between two steps, stop if all ranks stop here. Otherwise run the hooks that are due, in their order: a
        checkpoint follows an evaluation, and precedes it too if `save_minutes` have passed."""
        state = self.state
        if self.last is not None and state.progress.step >= self.last:
            self.finish_steps()
            self.guard.halt_if_asked()
            if state.stop.signal:
                raise Interrupted
            self.last = None  # a later update was applied, so the guard no longer asks to stop
        for hook in state.hooks:
            if hook.due(state):
                self.finish_steps()
                with state.report.meter.paused():
                    if hook.saves_before and self.checkpoints.overdue(state):
                        self.checkpoints.save(state)
                    hook.run(state)

    def finish_steps(self) -> None:
        """Wait for every step that was sent, and report it."""
        with marked("wait for steps"):
            finished = self.pipeline.finished(wait=True)
        for done in finished:
            self._take(done)

    def _take(self, done: Figures) -> None:
        state = self.state
        state.ranks.finished(done)
        state.report.step(done, scaled=self.step.scaler is not None)
        for hook in state.hooks:
            hook.step_done(state, done)
        if done.signals.stop:
            state.stop.signal = state.stop.signal or signal.SIGTERM
        if self.last is None and (done.signals.stop or self.guard.stops):
            # A rank may have sent `steps_ahead` steps more before it sees these figures: all stop after the last one.
            self.last = done.tag["step"] + self.pipeline.steps_ahead

    def _finish(self, stopped: str) -> dict[str, Any]:
        """Take the best weights, write the adapter or model, and let the hooks add to the summary. Rank 0 does it while
        the others wait; they get an empty summary. Where the base is sharded over the ranks, no forward pass works
        without all of them: then every rank does the same, and the others write to a temporary folder."""
        state, parts = self.state, self.parts
        ranks, p, console = state.ranks, state.progress, state.report.console
        if not ranks.leads and not state.together:
            return {}
        if ranks.leads:
            self.checkpoints.take_best(state)
        if state.together:
            ranks.spread(parts, p)
        if p.step and not p.updates:
            why = "every update was skipped, because no gradient was finite"
            if state.config.rl.reward:
                why = "no update was made, because no group had two different rewards, or no gradient was finite"
            state.report.warn(f"{why}: nothing was trained", p.step)
        elif (
            p.first_loss is not None
            and p.best_loss is not None
            and p.best_loss >= p.first_loss
            and p.best_metric is None
        ):
            text = "validation loss did not fall below where it started: training does not help on this data"
            state.report.warn(text, p.step)
        place = nullcontext(state.folder) if ranks.leads else tempfile.TemporaryDirectory()
        with console.working(f"writing the {parts.product}"), place as folder:
            parts.write(Path(folder) / parts.product)
        summary: dict[str, Any] = {
            "trained": _trained(parts),
            "best_step": p.best_step,
            "validation_loss": {"start": p.first_loss, "best": p.best_loss},
        }
        for hook in state.hooks:
            summary |= hook.finish(state)
        if not ranks.leads:
            return {}
        summary |= state.report.cost(parts) | {"peak_memory": peak_resident_bytes()}
        state.report.memory_in_all(p.step)
        state.report.end(parts, p.step, stopped, **summary)
        return summary

    def _tell_event(self, event: Event) -> None:
        """Call the callbacks, and the tracker, with an event of the log. A callback that returns "stop" ends the run
        after a checkpoint, as Ctrl-C does."""
        answers = [callback(event) for callback in self.callbacks]
        self.tracking(event)
        if "stop" in answers:
            self.state.stop.signal = self.state.stop.signal or signal.SIGINT

    # Signals

    def _signal_watch(self) -> SignalWatch:
        """Handles signals while steps run. Unfinished work is given up only on a CPU and with one process: on a GPU the
        host only queues work, which is quick, and no rank may leave a step that others have begun."""
        state, alone = self.state, self.state.ranks.world is None
        on_cpu = self.parts.runtime.device.type == "cpu"
        return SignalWatch(
            state.stop.note,
            within=self.parts.config.run.stop_within if alone and on_cpu else 0.0,
            overdue=self._give_up,
            confirm=self._confirm_stop,
            lost=lambda: self.checkpoints.lost(state),
            once=not alone,
        )

    def _confirm_stop(self, number: int) -> None:
        """Called in a thread, while the step goes on."""
        again = "; Ctrl-C again ends at once" if number == signal.SIGINT and self.state.ranks.world is None else ""
        if number != HANGUP:  # then the terminal may be gone
            self.state.report.console.note(f"stopping and saving the last whole step{again}")

    def _give_up(self) -> None:
        """Leave a micro-batch, an evaluation or answers that take too long after a signal."""
        if self.pipeline.in_micro or self.state.stop.may_give_up:
            self.pipeline.in_micro = self.state.stop.may_give_up = False
            raise Interrupted

    def _save_and_stop(self) -> None:
        state, number = self.state, self.state.stop.signal
        if number == HANGUP:
            state.report.silence()
        self.step.discard()
        self.finish_steps()
        if not self.closing:  # by then the arena may hold the best step's weights
            self.checkpoints.save(state)
        if state.ranks.leads:
            state.report.end(self.parts, state.progress.step, "interrupted", signal=int(number))


def _trained(parts: SessionParts) -> str:
    """What was trained, in a few words."""
    values = f"{len(parts.arena.weights) / 1e6:.2f}M values"
    if parts.config.train.method != "lora":
        start = "from scratch" if parts.config.train.method == "scratch" else "every weight"
        return f"{parts.base.name}, {start}, {values}"
    return f"LoRA of rank {parts.lora.rank} on {parts.base.name}, {values}"
