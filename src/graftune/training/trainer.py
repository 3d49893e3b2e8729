"""The training loop. It sends steps to the device, takes their figures when they arrive, and calls the hooks: checks of
the numbers, evaluations, checkpoints, samples, profiles and trackers are in files of their own (hooks.py).

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
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graftune.data.encoded import reference_model_of
from graftune.model.context import micro_batch_id
from graftune.model.feed_forward.routing import FIGURES as ROUTING
from graftune.observe.console import Console
from graftune.observe.events import Event, EventLog
from graftune.observe.trackers import Tracking
from graftune.spans import marked
from graftune.step.pipeline import Figures
from graftune.step.schedule import hyperparameters, learning_rate
from graftune.training import ending
from graftune.training.checkpoints import Checkpoints
from graftune.training.evaluation import Evaluation
from graftune.training.guard import Guard, Halted
from graftune.training.hooks import Hook, RunState
from graftune.training.prepare import Prepared
from graftune.training.preview import Preview
from graftune.training.profiler import ProfiledSteps, Trace
from graftune.training.references import References
from graftune.training.reporter import Reporter, live_speed
from graftune.training.resume import find_checkpoint, identity, resume_folder, run_length, write_start
from graftune.training.samples import Samples
from graftune.training.signals import HANGUP, Interrupted, SignalWatch
from graftune.training.trackers import Callback, Callbacks, Trackers


@dataclass
class TrainResult:
    """The outcome of a run."""

    folder: Path  # with the adapter, the checkpoints and the log
    steps: int  # in all
    stopped: str  # finished, early stop or interrupted
    first_eval: float | None  # the validation loss before the first step
    best_eval: float | None  # the least one since
    summary: dict[str, Any] = field(default_factory=dict)  # the figures of the log's last event
    signal: int = 0  # that interrupted it
    started: bool = True  # False: stopped while it was prepared, with nothing written


class Trainer:
    """One training run in its folder."""

    def __init__(self, prepared: Prepared, console: Console, callbacks: Sequence[Callback] = ()):
        self.prepared, self.parts = prepared, prepared.parts
        parts, config, ranks = prepared.parts, prepared.parts.config, prepared.ranks
        self.loader = parts.loader(prepared.data.training.examples)
        self.shape = parts.fix_shape(self.loader, config.train.epochs)
        self.step, self.pipeline = parts.step, parts.pipeline
        self.length = run_length(self.loader, config.train)
        self.length_before = run_length(self.loader, prepared.before.train) if prepared.before else self.length
        data = prepared.data.training.sha256 + (prepared.data.validation.sha256 if config.data.eval_data else "")
        same = identity(config, parts.base, data, prepared.data.examples_sha256)
        self.found: Path | None = None  # the checkpoint to go on from
        if prepared.before is not None and ranks.leads:
            self.found = find_checkpoint(prepared.folder, same, self.length_before.epoch_steps, console.warn)
        log = EventLog(prepared.folder / "metrics.jsonl" if ranks.leads else os.devnull, self._tell_event)
        live = live_speed(parts, prepared.data.training.examples, self.shape)
        report = Reporter(console, log, self.length.total, parts.runtime.device, prepared.plan, live)
        epoch_steps = max(self.length.epoch_steps, self.length_before.epoch_steps, key=len)
        self.state = RunState(parts, prepared.folder, ranks, report, self.length.total, epoch_steps)
        self.checkpoints = Checkpoints(prepared.folder / "checkpoints", same)
        self.guard = Guard(self.loader, self.checkpoints, config.run.max_skipped, config.run.stop_on_warning)
        self._around_step: Callable[[], AbstractContextManager[None]] = nullcontext
        self.hooks = self.state.hooks = self._hooks(callbacks)
        self.last: int | None = None  # the step after which all ranks stop, once one of them asks for it
        self.closing = False  # all steps are done: what is left changes no checkpoint

    def _hooks(self, callbacks: Sequence[Callback]) -> list[Hook]:
        """In the order in which they are called."""
        prepared, state, run = self.prepared, self.state, self.parts.config.run
        leads, console = state.ranks.leads, state.report.console
        training, hooks = prepared.data.training, list[Hook]()
        if reference_model_of(training.examples):
            used = training.subset(self.loader.used(state.total)).examples  # a short run does not read all of them
            hooks.append(References(used, prepared.data.validation.examples))
        hooks.append(Preview(training.examples))
        if run.trace_steps and leads:
            hooks.append(Trace())
        if run.profile_every and state.ranks.world is not None:
            console.warn("profile_every is for one process: the steps of several ranks are not profiled")
        elif run.profile_every:
            live = state.report.live
            profiled = ProfiledSteps(self.parts, self.shape, live.floor_ms if live else None)
            self._around_step = profiled.around_step
            hooks.append(profiled)
        if prepared.data.questions.questions:
            hooks.append(Samples(prepared.data.questions))
        if prepared.data.validation.examples:
            hooks.append(Evaluation(prepared.data.validation.examples, prepared.data.metric))
        hooks += [self.checkpoints, self.guard]
        if callbacks:
            hooks.append(Callbacks(callbacks))
        if run.track != "none" and leads:
            settings = self.parts.config.flat()
            figures = (*self.parts.loss.figures, *(ROUTING if self.parts.step.routing is not None else ()))
            tracking = Tracking(run.track, state.folder, settings, console.warn, state.epoch_steps, figures)
            hooks.append(Trackers(tracking))
        return hooks

    def start(self) -> None:
        """Write a new folder: the configuration and the log's first line. From here on the run can be resumed."""
        data, plan = self.prepared.data, self.prepared.plan
        write_start(self.state, data.training, plan, self.checkpoints.identity, self.shape)

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
            for hook in self.hooks:
                hook.close(state)
            state.report.log.close()
        p = state.progress
        return TrainResult(state.folder, p.step, stopped, p.first_loss, p.best_loss, summary, state.stop.signal)

    def _to_the_end(self) -> tuple[str, dict[str, Any]]:
        """How the run ended, and its summary."""
        state = self.state
        try:
            stopped = self._train()
            if not self.prepared.data.validation.examples:  # else the last evaluation was saved
                self.checkpoints.save(state)
            self.closing = True
            state.report.phase("finalising")
            with state.ranks.busy("finishing the run"):
                return stopped, ending.finish(state, self.checkpoints, stopped)
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
            for hook in self.hooks:
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
            for hook in self.hooks:
                hook.stop(state)

    def _ended(self) -> str:
        p, patience = self.state.progress, self.parts.config.train.patience
        if p.step >= self.state.total:
            return "finished"
        return "early stop" if patience and p.stale >= patience else ""

    def _epoch(self) -> None:
        """Take steps until the epoch or the run ends."""
        state, report, p = self.state, self.state.report, self.state.progress
        for hook in self.hooks:
            hook.paused(state, "epoch", 0.0)
        for micro_batches in self.loader.epoch(p.epoch, p.epoch_step, self.pipeline.stage):
            began, waited = time.perf_counter(), self.pipeline.waited
            self._send(micro_batches)
            for done in self.pipeline.finished():
                self._take(done)
            report.host_seconds.append(time.perf_counter() - began - (self.pipeline.waited - waited))
            if self.last is not None and p.step >= self.last:
                self._stop_after_last()
            self._run_due()
            if self._ended():
                return

    def _send(self, micro_batches: list[Any]) -> None:
        """Send a step to the device. Its figures are asked for later."""
        state, report, p, optim = self.state, self.state.report, self.state.progress, self.parts.config.optim
        lr = learning_rate(p.step, state.total, optim)
        tokens, responses = self.loader.counts(p.epoch, p.epoch_step)
        hyper = hyperparameters(optim, lr=lr, divisor=self.loader.divisor(p.epoch, p.epoch_step))
        ids = [micro_batch_id(p.step, number) for number in self.loader.bins(p.epoch, p.epoch_step)]
        if state.ranks.world is not None:  # a step that others have begun is not left: all stop after the same one
            hyper["stop"] = float(state.stop.signal > 0)
        facts = {"step": p.step + 1, "epoch": p.epoch, "lr": lr, "tokens": tokens, "response_tokens": responses}
        facts |= {"micro_batches": len(micro_batches)}
        report.sending()
        state.ranks.begin(p.step + 1)
        # In the first step kernels compile and the graph is captured.
        with nullcontext() if report.host_seconds else marked("first step"), self._around_step():
            self.pipeline.step(micro_batches, hyper, ids, facts, state.check_stop_alone)
        p.step, p.epoch_step = p.step + 1, p.epoch_step + 1
        report.sent(self.parts, p.step)
        for hook in self.hooks:
            hook.step_sent(state, len(micro_batches))

    def _run_due(self) -> None:
        """Run the hooks that are due between two steps, in their order: a checkpoint follows an evaluation."""
        state = self.state
        for hook in self.hooks:
            if hook.due(state):
                self.finish_steps()
                with state.report.meter.paused():
                    if isinstance(hook, Evaluation) and self.checkpoints.overdue(state):  # an evaluation may take long
                        self.checkpoints.save(state)
                    hook.run(state)

    def finish_steps(self) -> None:
        """Wait for every step that was sent, and report it."""
        with marked("wait for steps"):
            finished = self.pipeline.finished(wait=True)
        for done in finished:
            self._take(done)

    def _take(self, done: Figures) -> None:
        """Take the figures of a step that is done."""
        state = self.state
        state.ranks.finished(done)
        state.report.step(done, scaled=self.step.scaler is not None)
        for hook in self.hooks:
            hook.step_done(state, done)
        if done.signals.stop:
            state.stop.signal = state.stop.signal or signal.SIGTERM
        if self.last is None and (done.signals.stop or self.guard.stops):
            # By then every rank knows, whichever step it had sent when the figures arrived.
            self.last = done.tag["step"] + self.pipeline.ahead

    def _stop_after_last(self) -> None:
        """The step after which all ranks stop is done. It goes on if later updates were not skipped any more."""
        self.finish_steps()
        self.guard.halt_if_asked()
        if self.state.stop.signal:
            raise Interrupted
        self.last = None

    def _tell_event(self, event: Event) -> None:
        for hook in self.hooks:
            hook.event(self.state, event)

    # Signals

    def _signal_watch(self) -> SignalWatch:
        """On a GPU the host only sends work, which takes no time to speak of: nothing is given up there. Of several
        ranks none leaves a step that others have begun."""
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
