"""Hooks do everything in a run that is not a step: each is a class, mostly in a file of its own, that overrides some of
the methods below. A hook receives the state of the run, not the trainer. Only the guard calls another one by name: the
checkpoints.

To add one: write its file, add it to the list in trainer.py, and test it with a made-up state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graftune.observe.events import Event
from graftune.session import SessionParts
from graftune.settings.config import Config
from graftune.spans import marked
from graftune.step.evaluate import EvalResult
from graftune.step.pipeline import Figures
from graftune.training.ranks import SingleProcess
from graftune.training.reporter import Reporter
from graftune.training.signals import HANGUP, Interrupted, StopRequest
from graftune.weights.checkpoint import Progress


class Hook:
    """Every method is optional. Several ranks call the hooks in the same order, but `paused`, `finish` and a `run` that
    is due by the clock may be called on rank 0 alone."""

    saves_before = False  # whether a checkpoint that is due is written before `run`, because that may take long

    def resumed(self, state: RunState, events: Sequence[Event]) -> None:
        """A run was resumed. `events` are those of its log, on rank 0; the other ranks get none."""

    def start(self, state: RunState) -> None:
        """Before the first step of this process."""

    def step_sent(self, state: RunState, micro_batches: int) -> None:
        """A step was sent; `state.progress` counts it. Must not wait for the device."""

    def step_done(self, state: RunState, figures: Figures) -> None:
        """The figures of a step have arrived, on a GPU one or two steps after it was sent."""

    def due(self, state: RunState) -> bool:
        """Whether `run` is to be called now. Asked after every step and before the first one."""
        return False

    def run(self, state: RunState) -> None:
        """Between two steps, when all steps that were sent have finished. Its time does not count as a step's."""

    def evaluated(self, state: RunState, result: EvalResult) -> None:
        """An evaluation was made."""

    def paused(self, state: RunState, work: str, seconds: float) -> None:
        """The device did other work than steps: an evaluation, a checkpoint, samples, or a new epoch was begun."""

    def stop(self, state: RunState) -> None:
        """No further step follows, because the run has reached its end, was interrupted or failed."""

    def finish(self, state: RunState) -> dict[str, Any]:
        """The run has reached its end and its product is written. Returns figures for the run's summary."""
        return {}

    def close(self, state: RunState) -> None:
        """The run is over, however it ended."""


@dataclass
class RunState:
    """The state of a run that hooks receive."""

    parts: SessionParts
    folder: Path
    ranks: SingleProcess
    report: Reporter  # the console and the log
    total: int  # steps of the whole run
    epoch_steps: Sequence[int]  # steps of each epoch
    progress: Progress = field(default_factory=Progress)
    stop: StopRequest = field(default_factory=StopRequest)
    hooks: Sequence[Hook] = ()  # in the order in which they are called

    @property
    def config(self) -> Config:
        return self.parts.config

    @property
    def epoch_ends(self) -> bool:
        return self.progress.epoch_step == self.epoch_steps[self.progress.epoch]

    @contextmanager
    def pausing_steps(self, work: str) -> Iterator[None]:
        """Around other work than steps. It is a named range in a trace, and each hook's `paused` gets its seconds."""
        began = time.perf_counter()
        with marked(work):
            yield
        for hook in self.hooks:
            hook.paused(self, work, time.perf_counter() - began)

    @contextmanager
    def counting(
        self, work: str, label: str, total: int, unit: str, check: Callable[[], None] | None = None
    ) -> Iterator[Callable[[int], None]]:
        """Around other work than steps that a signal may end anywhere. Shows its progress, and yields a callback for
        its count, which calls `check` first (check_stop_alone, unless another is given)."""
        look = check or self.check_stop_alone
        shown = self.report.console.progress(total, label=label, unit=unit)
        with self.pausing_steps(work), shown as bar, self.stop.interruptible():

            def count(done: int) -> None:
                look()
                bar.update(done)

            yield count

    @property
    def together(self) -> bool:
        """Whether every forward pass needs all ranks, because the base is sharded over them."""
        return self.parts.placement.ranks > 0

    def check_stop(self) -> None:
        """Raise `Interrupted` if a signal has asked the run to stop."""
        if self.stop.signal:
            if self.stop.signal != HANGUP:
                self.report.console.note("stopping: saving a checkpoint")
            raise Interrupted

    def check_stop_alone(self) -> None:
        """`check_stop` in a run of one process. With several ranks, none may leave work that all do together."""
        if self.ranks.world is None:
            self.check_stop()
