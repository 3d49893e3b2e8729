"""The run: owns the host, the clock and the disk. Everything per step is in step.py, how steps are sent to the device
without waiting for them in step/pipeline.py, and what is said of them in reporter.py.

A run is a function of its place. `Progress` says which step is next and which evaluation was last; what is due follows
from it and from nothing else, so a run that was killed anywhere goes on from its last checkpoint and does, bit for
bit, what it would have done. Signals are noticed between micro-batches; what had added up since the last update is
dropped, the last whole step is saved.

`Progress.step` counts the steps that were sent. Their figures come when they are done, on a GPU a step or two later;
before an evaluation, a checkpoint and the end all of them are waited for, so that the log never lacks a step which a
checkpoint holds.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graftune.io.files import write_file
from graftune.kernels.adamw import Hyper
from graftune.model.context import dropout_seed
from graftune.observe.console import Console
from graftune.observe.events import Event, EventLog, read_events
from graftune.observe.profiler import StepTrace
from graftune.spans import marked
from graftune.step.pipeline import Figures
from graftune.step.schedule import learning_rate
from graftune.training.ending import answer_samples, ask_base, finish
from graftune.training.guard import Guard
from graftune.training.halting import Halted, halted, look_at_end, look_at_weights
from graftune.training.live import live_speed, profiled_steps, tracking_of
from graftune.training.prepare import Prepared, report_start
from graftune.training.preview import PreviewWriter
from graftune.training.profiled_steps import ProfiledSteps
from graftune.training.reporter import Reporter
from graftune.training.resume import changed_since, check_longer, computed_by, identity, keep_changes, run_length
from graftune.training.signals import HANGUP
from graftune.training.stop import Interrupted, lost, may_give_up, stop, stopping
from graftune.training.typed import typed_command
from graftune.weights import checkpoint
from graftune.weights.checkpoint import Progress

Callback = Callable[[Event], object]


@dataclass
class TrainResult:
    """What a run came to."""

    folder: Path  # with the adapter, the checkpoints and the log
    steps: int  # in all
    stopped: str  # finished, early stop or interrupted
    first_eval: float | None  # the validation loss before the first step
    best_eval: float | None  # the least one since
    summary: dict[str, Any] = field(default_factory=dict)  # what the log's last event says
    signal: int = 0  # that interrupted it
    started: bool = True  # False: stopped while it was prepared, with nothing written


class Run:
    """One training run in its folder."""

    def __init__(self, prepared: Prepared, console: Console, callbacks: Sequence[Callback] = ()):
        self.ranks = prepared.ranks
        self.folder, self.session, self.console = prepared.folder, prepared.session, console
        self.training, self.validation = prepared.training, prepared.validation
        self.plan, self.answers = prepared.plan, prepared.answers
        session = prepared.session
        self.config = config = session.config
        self.progress = Progress()
        self.loader = session.loader(self.training.examples)
        self.shape = session.fix_shape(self.loader, config.train.epochs)
        self.step, self.pipeline, self.graph = session.step, session.pipeline, config.train.graph
        self.attention, self.captures = session.attention.backend, 0  # as last reported
        length = run_length(self.loader, config.train)
        self.before = run_length(self.loader, prepared.before.train) if prepared.before else length
        self.total, self.epoch_steps = length.total, max(length.epoch_steps, self.before.epoch_steps, key=len)
        self.tracking = tracking_of(config, prepared, console, self.epoch_steps)
        self.callbacks: Sequence[Callback] = [*callbacks, *([self.tracking] if self.tracking else [])]
        self.saved_at = _minutes()
        self.base_answers: list[str] = []
        self.checkpoints = self.folder / "checkpoints"
        self.examples_sha256 = prepared.examples_sha256
        self.signal = 0
        self.last: int | None = None  # the step after which all ranks stop, once some rank wants to
        self.saved = -1  # the step of the last checkpoint
        self.nonfinite_reported = False  # whether it was said that something is not finite and is not saved
        self.may_give_up = False  # an evaluation or answers, which change no weight
        self.closing = False  # all steps are done: what is left changes no checkpoint
        self.log: EventLog
        self.reporter: Reporter
        self.guard: Guard
        self.profiling: ProfiledSteps

    # Beginning

    def start(self) -> None:
        """A new folder: the configuration, the log's first line. From here on the run can be resumed."""
        self._open_log()
        if self.ranks.leads:
            self._write_start()
        report_start(self.console, self.session, self.folder, self.total, self.shape, self.graph)

    def _write_start(self) -> None:
        session = self.session
        facts: dict[str, Any] = {"command": typed_command(), **computed_by(session)}
        facts |= {"examples": len(self.training), "encoded": self.training.examples.store.header.get("key", "")}
        self.log.emit("run_start", **facts, **self.identity(), steps=self.total, trainable=len(session.arena.weights))
        if self.plan is not None:
            write_file(self.folder / "plan.json", json.dumps(self.plan.document(), indent=1) + "\n")
        self.config.save(self.folder / "config.yaml")  # last: what has one can be resumed

    def resume(self) -> None:
        """An existing folder: the latest whole checkpoint, or the beginning if there is none yet."""
        if self.ranks.leads:
            self._read_folder()
        else:
            self._open_log()
        self.progress = self.ranks.spread(self.session, self.progress)
        self.guard.said = set(self.ranks.from_lead(lambda: sorted(self.guard.said)))

    def _read_folder(self) -> None:
        identity, epochs = self.identity(), self.before.epoch_steps
        found = checkpoint.newest_whole(self.checkpoints, identity, epochs, self.console.warn)
        if found is not None:
            place, _ = checkpoint.read_state(found)
            check_longer(self.folder, place.step, self.total, self.config.train)
            self.progress = checkpoint.load(found, self.session.arena, identity, self.step.scaler, checked=True)
            self.step.count.fill_(self.progress.updates)
            self.saved = self.progress.step
            if found == checkpoint.latest(self.checkpoints):  # or it might be the one that is one too many
                checkpoint.prune(self.checkpoints, self.config.train.keep_last, self.progress.best_step)
        self._open_log()
        events = read_events(self.folder / "metrics.jsonl")
        starts = [event for event in events if event["event"] == "run_start"]
        if found is None and starts:
            checkpoint.check_identity(self.identity(), starts[-1], self.folder)
        self.guard.said = {str(event["kind"]) for event in events if event["event"] == "warning" and "kind" in event}
        for event in events:
            if event["event"] == "sample" and event.get("step") == 0:  # to other questions if there are other samples
                self.base_answers = self.answers.known(event)
        now = computed_by(self.session)
        changes = changed_since(now, events)
        self.log.emit("resume", step=self.progress.step, **now)
        report_start(self.console, self.session, self.folder, self.total, self.shape, self.graph)
        where = f"step {self.progress.step}" if found else "the beginning: no checkpoint had been written"
        self.console.note(f"resuming {self.folder} at {where}")
        if changes:
            self.reporter.warn(changes, self.progress.step)
        keep_changes(self)

    def _open_log(self) -> None:
        path = self.folder / "metrics.jsonl" if self.ranks.leads else os.devnull
        self.log = EventLog(path, self._called_back if self.callbacks else None)
        self.reporter = Reporter(self.console, self.log, self.total, self.session.runtime.device, self.plan)
        self.reporter.live = live_speed(self.session, self.training, self.pipeline, self.shape)
        self.guard = Guard(self.reporter.warn, self.config.run.max_skipped, self.config.run.stop_on_warning)
        self.profiling = profiled_steps(self)

    def identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to fit."""
        data = self.training.sha256 + (self.validation.sha256 if self.config.data.eval_data else "")
        return identity(self.config, self.session.base, data, self.examples_sha256)

    # The run itself

    def go(self) -> TrainResult:
        preview = PreviewWriter(self.folder, self.training.examples, self.session.tokenizer, self.reporter.warn)
        if self.ranks.leads:
            preview.start()
        try:
            with stopping(self):  # until the last checkpoint is written: a signal is often sent twice
                stopped, summary = self._to_the_end(preview)
        except Halted:
            raise halted(self) from None
        finally:
            preview.finish()
            self.log.close()
            if self.tracking:
                self.tracking.close()
        p = self.progress
        return TrainResult(self.folder, p.step, stopped, p.first_loss, p.best_loss, summary, self.signal)

    def _to_the_end(self, preview: PreviewWriter) -> tuple[str, dict[str, Any]]:
        """How the run ended, and its summary."""
        try:
            stopped = "early stop" if self._train() == "early" else "finished"
            preview.finish()  # before the log's last word: a run that has it lacks nothing
            return stopped, self._finish(stopped)
        except (Interrupted, OSError) as error:
            if isinstance(error, OSError) and not self.signal:
                self.console.note(lost(self))  # the log or a checkpoint could not be written
                raise
            # A terminal that has gone fails whatever writes to it: the checkpoint comes first, and without a word.
            stop(self)
            return "interrupted", {}

    def _train(self) -> str:
        # Adapters can be switched off, so their base is asked at the end. Full training overwrites its base.
        full = self.config.train.method == "full"
        ask = self.ranks.leads and full and bool(self.answers.questions)
        if not self.validation.examples:  # or the first evaluation does
            look_at_weights(self)
        if ask and not self.base_answers and not self.progress.step:
            with self.ranks.busy("asking the base"):
                ask_base(self)
        traced, device = self.config.run.trace_steps if self.ranks.leads else 0, self.session.runtime.device
        trace = StepTrace(traced, self.folder / "trace.json.gz", device, self.console.note)
        with self.reporter.steps(self.progress.step), trace:
            while True:
                p = self.progress
                if self._evaluation_due():
                    self.finish_steps()
                    with self.reporter.meter.paused():
                        if self._save_due():  # an evaluation may take long
                            self.save()
                        self._evaluate()
                if p.step >= self.total:
                    self.finish_steps()
                    look_at_weights(self)
                    self._halt_if_asked()
                    look_at_end(self)
                    return "done"
                if self.config.train.patience and p.stale >= self.config.train.patience:
                    return "early"
                if p.epoch_step == self.epoch_steps[p.epoch]:
                    p.epoch, p.epoch_step = p.epoch + 1, 0
                self._epoch(trace)

    def _epoch(self, trace: StepTrace) -> None:
        """Steps until an evaluation is due or the epoch ends."""
        p, settings = self.progress, self.config.train
        compiles = self.session.runtime.device.type == "cuda" and not self.reporter.host_seconds
        self.reporter.phase("compiling" if compiles else "training")
        self.profiling.interrupted()
        for micro_batches in self.loader.epoch(p.epoch, p.epoch_step, self.pipeline.stage):
            began, waited = time.perf_counter(), self.pipeline.waited
            self._one_step(micro_batches)
            trace.step()
            self.reporter.profiled(self.profiling.sent(p.step, len(micro_batches)), p.step)
            for done in self.pipeline.finished():
                self._take(done)
            self.reporter.host_seconds.append(time.perf_counter() - began - (self.pipeline.waited - waited))
            if self.last is not None and p.step >= self.last:
                self._stop_there()
            if self._samples_due():
                self.finish_steps()
                with self.reporter.meter.paused():
                    answer_samples(self)
            if self._evaluation_due() or p.step >= self.total:
                return
            ends = p.epoch_step == self.epoch_steps[p.epoch]
            if ends or self._save_due() or (settings.save_every and p.step % settings.save_every == 0):
                self.finish_steps()
                with self.reporter.meter.paused():
                    self.save()

    def _one_step(self, micro_batches: list[Any]) -> None:
        """Send a step on its way; what came of it is asked for later."""
        p, optim = self.progress, self.config.optim
        lr = learning_rate(p.step, self.total, optim)
        tokens, responses = self.loader.counts(p.epoch, p.epoch_step)
        hyper = {name: getattr(optim, name) for name in Hyper._fields if name != "divisor"}
        hyper |= {"lr": lr, "divisor": self.loader.divisor(p.epoch, p.epoch_step)}
        dropout_seeds = [dropout_seed(p.step, number) for number in self.loader.bins(p.epoch, p.epoch_step)]
        between = self._between
        if self.ranks.world is not None:  # a step that others have begun is not left: all stop after the same one
            hyper["stop"], between = float(self.signal > 0), _go_on
        facts = {"step": p.step + 1, "epoch": p.epoch, "lr": lr, "tokens": tokens, "response_tokens": responses}
        facts |= {"micro_batches": len(micro_batches)}
        first = not self.reporter.host_seconds
        with marked("first step") if first else nullcontext():  # kernels compile, the graph is captured
            self.ranks.begin(p.step + 1)
            with self.profiling.step():
                self.pipeline.step(micro_batches, hyper, dropout_seeds, facts, between)
        p.step, p.epoch_step = p.step + 1, p.epoch_step + 1
        self._report_chosen()

    def _report_chosen(self) -> None:
        """Report what the first batch of a shape decided: the fastest attention, and one more capture."""
        if self.step.backend != self.attention:
            self.console.note(f"attention: {self.step.backend}, timed as the fastest on these documents")
        if self.pipeline.captures > max(1, self.captures):
            self.console.warn(f"step {self.progress.step}: captured again, for batches of another shape")
        self.attention, self.captures = self.step.backend, self.pipeline.captures

    def finish_steps(self) -> None:
        """Wait for every step that was sent, and report it."""
        with marked("wait for steps"):
            finished = self.pipeline.finished(wait=True)
        for done in finished:
            self._take(done)

    def _take(self, done: Figures) -> None:
        """The figures of a step that is done."""
        self.ranks.finished(done)
        self.reporter.step(done, scaled=self.step.scaler is not None)
        self.guard.step(done)
        if done.signals.stop:
            self.signal = self.signal or signal.SIGTERM
        if self.last is None and (done.signals.stop or self.guard.stops):
            # By then every rank knows, whichever step it had sent when it learnt of it.
            self.last = done.tag["step"] + self.pipeline.ahead

    def _stop_there(self) -> None:
        """The step has come that all ranks stop after, unless updates behind the skipped ones were made again."""
        self.finish_steps()
        self._halt_if_asked()
        if self.signal:
            raise Interrupted
        self.last = None

    def _halt_if_asked(self) -> None:
        if self.guard.stops:
            raise Halted

    # Evaluations and checkpoints

    def _evaluation_due(self) -> bool:
        """Before the first step, every eval_every steps, after each epoch and at the end; each once."""
        p, every = self.progress, self.config.train.eval_every
        if not self.validation.examples or p.last_eval == p.step:
            return False
        ends = p.epoch_step == self.epoch_steps[p.epoch] or p.step >= self.total
        return p.step == 0 or ends or (every > 0 and p.step % every == 0)

    def _samples_due(self) -> bool:
        """At the end the prompts are answered in any case."""
        every, step = self.config.run.sample_every, self.progress.step
        return bool(every and self.answers.shown) and step % every == 0 and step < self.total

    def _evaluate(self) -> None:
        p = self.progress
        self.reporter.phase("evaluating")
        examples, between = self.validation.examples, self._between if self.ranks.world is None else _go_on
        counted = self.reporter.counted("validating", len(examples), "examples", between)
        with marked("evaluate"), self.profiling.beside("evaluation"), counted as count, may_give_up(self):
            result = self.session.evaluated(examples, on_progress=count)
        self.reporter.evaluation(result, p.step, p.epoch)
        better = math.isfinite(result.loss) and (p.best_loss is None or result.loss < p.best_loss)
        p.last_eval = p.step
        if p.step == 0:
            p.first_loss = result.loss if math.isfinite(result.loss) else None  # as in the log
        elif better:
            p.best_loss, p.best_step, p.stale = result.loss, p.step, 0
        else:
            p.stale += 1
        self.save()
        self.guard.evaluation(p.step, result.loss, p.first_loss)
        look_at_weights(self)
        self._halt_if_asked()
        self.signal = self.ranks.agreed(self.signal)
        self._between()

    def _save_due(self) -> bool:
        minutes = self.config.train.save_minutes if self.ranks.leads else 0
        return minutes > 0 and self.progress.step > 0 and _minutes() - self.saved_at >= minutes

    def save(self) -> None:
        """After `finish_steps`: what the checkpoint holds is in the log. Weights that are not finite are not saved, so
        that no checkpoint from before is deleted for them."""
        p = self.progress
        p.updates = int(self.step.count)
        if not self.ranks.leads:
            return
        if not checkpoint.is_sound(self.session.arena):
            if not self.nonfinite_reported:
                self.reporter.warn(f"what is trained is not finite at step {p.step}: it is not saved", p.step)
            self.nonfinite_reported = True
            return
        busy = self.ranks.busy("writing a checkpoint")
        with marked("checkpoint"), busy, self.profiling.beside("checkpoint"):
            self.log.sync()
            checkpoint.save(self.checkpoints, self.session.arena, p, self.identity(), self.step.scaler)
            checkpoint.prune(self.checkpoints, self.config.train.keep_last, p.best_step)
        self.saved, self.saved_at = p.step, _minutes()
        self.reporter.live_plot.update()

    # The end

    def _finish(self, stopped: str) -> dict[str, Any]:
        if not self.validation.examples:
            self.save()
        self.closing = True
        self.reporter.phase("finalising")
        with self.ranks.busy("finishing the run"):
            return finish(self, stopped)

    def cost(self) -> dict[str, Any]:
        return self.reporter.cost(self.pipeline.captures) | {"attention": self.step.backend}

    # Signals

    def _between(self) -> None:
        if self.signal:
            if self.signal != HANGUP:
                self.console.note("stopping: saving a checkpoint")
            raise Interrupted

    def between_answers(self) -> None:
        """Where all ranks answer together none of them can leave."""
        if self.ranks.world is None or not self.session.placement.ranks:
            self._between()

    def _called_back(self, event: Event) -> None:
        """The callbacks get each event; one of them may stop the run, as Ctrl-C does."""
        answers = [callback(event) for callback in self.callbacks]
        if "stop" in answers:
            self.signal = self.signal or signal.SIGINT


def _go_on() -> None:
    """Between micro-batches that several ranks have begun."""


def _minutes() -> float:
    return time.monotonic() / 60
