"""The training loop over data: it sends steps to the device; the rest is common to all runs (run.py). Checks of the
numbers, evaluations, checkpoints, samples, profiles and trackers are hooks in files of their own (hooks.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from graftune.data.encoded import reference_model_of
from graftune.model.context import micro_batch_id
from graftune.observe.console import Console
from graftune.spans import marked
from graftune.step.schedule import hyperparameters, learning_rate
from graftune.training.evaluation import Evaluation
from graftune.training.guard import Guard
from graftune.training.hooks import Hook
from graftune.training.prepare import Prepared
from graftune.training.preview import Preview
from graftune.training.profiler import ProfiledSteps, Trace
from graftune.training.references import References
from graftune.training.reporter import live_speed
from graftune.training.resume import write_start
from graftune.training.run import Callback, Run
from graftune.training.samples import Samples


class Trainer(Run):
    def __init__(self, prepared: Prepared, console: Console, callbacks: Sequence[Callback] = ()):
        self.prepared, self.evaluates = prepared, bool(prepared.data.validation.examples)
        parts, config = prepared.parts, prepared.parts.config
        training = prepared.data.training
        self.loader = parts.loader(training.examples)
        shape = parts.fix_shape(self.loader, config.train.epochs)
        data = training.sha256 + (prepared.data.validation.sha256 if config.data.eval_data else "")
        digests, live = (data, prepared.data.examples_sha256), live_speed(parts, training.examples, shape)
        super().__init__(prepared, console, callbacks, self.loader.steps_per_epoch, digests, shape, live)
        self.guard = Guard(self.loader, self.checkpoints, config.run.max_skipped, config.run.stop_on_warning)
        self._around_step: Callable[[], AbstractContextManager[None]] = nullcontext
        self.state.hooks = self._hooks()

    def _hooks(self) -> list[Hook]:
        """The run's hooks, in the order in which they are called."""
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
        return [*hooks, self.checkpoints, self.guard]

    def start(self) -> None:
        """Write a new folder: the configuration and the log's first line. From here on the run can be resumed."""
        training, plan = self.prepared.data.training, self.prepared.plan
        encoded = training.examples.store.header.get("key", "")
        write_start(self.state, len(training), plan, self.checkpoints.identity, self.shape, encoded)

    def _epoch(self) -> None:
        state, report, p = self.state, self.state.report, self.state.progress
        for hook in state.hooks:
            hook.paused(state, "epoch", 0.0)
        for micro_batches in self.loader.epoch(p.epoch, p.epoch_step, self.pipeline.stage):
            began, waited = time.perf_counter(), self.pipeline.waited
            self._send(micro_batches)
            for done in self.pipeline.finished():
                self._take(done)
            report.host_seconds.append(time.perf_counter() - began - (self.pipeline.waited - waited))
            self._run_due()
            if self._ended():
                return

    def _send(self, micro_batches: list[Any]) -> None:
        """Send a step to the device. Its figures are collected later."""
        state, report, p, optim = self.state, self.state.report, self.state.progress, self.parts.config.optim
        lr = learning_rate(p.step, state.total, optim)
        tokens, responses = self.loader.counts(p.epoch, p.epoch_step)
        hyper = hyperparameters(optim, lr=lr, divisor=self.loader.divisor(p.epoch, p.epoch_step))
        ids = [micro_batch_id(p.step, number) for number in self.loader.bins(p.epoch, p.epoch_step)]
        if state.ranks.world is not None:  # no rank leaves a step that others have begun: all stop after the same one
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
        for hook in state.hooks:
            hook.step_sent(state, len(micro_batches))
