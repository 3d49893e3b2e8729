"""`profile_every`: some steps are profiled while a run trains. `trace_steps`: some steps are traced by torch.

The step before profiled steps is timed plain. A profiled step is waited for, which leaves the device idle, so between
two of them one step passes untimed: like other steps of a run each begins while the one before it computes. On a GPU
the first profiled step of a turn (observe/profiler.py) captures the step once more and is discarded; its graphs are
kept, so that later occasions only replay them. An occasion that would begin during another one is left out. The profile
covers the latest occasions: its size, and the time that a document takes, do not grow with the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graftune import spans
from graftune.data.pack import Capacities
from graftune.io.files import write_file
from graftune.observe.profile import Profile
from graftune.observe.profiler import OF_A_LAYER, OUTSIDE, Recorder, StepTrace, turns_for
from graftune.session import Parts
from graftune.spans import EVERY_LAYER, StampTurn, Timeline
from graftune.training import floors
from graftune.training.hooks import Hook, RunState

WARM = 5  # steps of a run before the first that is profiled
BESIDE = {"evaluate": "evaluation", "checkpoint": "checkpoint"}  # work whose time a profile shows beside steps
MOST = 20  # samples of each turn that are kept: a document is made of them while the run waits


def facts_of(session: Parts, shape: Capacities | None) -> dict[str, Any]:
    """The facts of the machine and of the model in a profile."""
    settings, runtime = session.config.train, session.runtime
    found: dict[str, Any] = {"tokens_per_micro_batch": settings.tokens_per_micro_batch}
    if shape is not None:
        found |= {"documents": shape.max_docs, "longest": shape.longest, "response_rows": shape.max_rows}
    return {
        "device": runtime.device.type,
        "gpu": runtime.describe(),
        "model": session.base.name,
        "method": settings.method,
        "recompute": settings.recompute,
        "shape": found,
    }


def first_profiled(every: int, done: int) -> int:
    """The first step that is profiled of a run that goes on after `done`."""
    return -(-max(WARM + 2, done + 3) // every) * every


class ProfiledSteps(Hook):
    """For runs of one process: a capture more on one of several ranks would leave the others behind."""

    def __init__(self, session: Parts, shape: Capacities | None):
        loop, self.layers = session.pipeline, len(session.base.spec.layers)
        self.captured = loop.graph
        self.floor_ms = floors.known(session, shape)
        facts = facts_of(session, shape) | {"captured": self.captured}
        self.recorder = Recorder(spans.clock_for(session.runtime.device), Profile(facts=facts), MOST)
        self.left: list[StampTurn] = []  # of this occasion
        self.timeline: Timeline | None = None
        self.plain: Any = None  # the stamp before a step that is timed plain
        self.timed_plain: tuple[Any, Any] | None = None  # both stamps of one, which are not read yet
        self.idle = False  # the device has been waited for since the last step

    @property
    def profile(self) -> Profile:
        return self.recorder.profile

    def start(self, state: RunState) -> None:
        every = state.config.run.profile_every
        if (first := first_profiled(every, state.progress.step)) > state.total:
            state.report.console.warn(
                f"profile_every is {every}: the run ends at step {state.total}, before step {first} is profiled"
            )

    @contextmanager
    def around_step(self) -> Iterator[None]:
        if self.timeline is None:
            yield
            return
        with spans.recording(self.timeline):
            yield
            self.timeline.end()

    def step_sent(self, state: RunState, micro_batches: int) -> None:
        """Begin, go on with or end an occasion; at its end the documents are written into the folder."""
        step, every = state.progress.step, state.config.run.profile_every
        if self.timeline is not None:
            self._take(self.timeline, micro_batches)
            if not self.left:
                state.report.profiled(self._write(state.folder), step)
            return
        was_idle, self.idle = self.idle, False
        if self.left and was_idle:
            self.timeline = self.recorder.begin(self.left[0])
        elif self.plain is not None:
            self._begin()
        elif step >= WARM and (step + 2) % every == 0:
            self.plain = self.recorder.clock.stamp()

    def paused(self, state: RunState, work: str, seconds: float) -> None:
        """Discard the sample, because the device did something else meanwhile."""
        if work in BESIDE:
            self.profile.beside[BESIDE[work]] = seconds * 1e3
        self.plain = None
        if self.timeline is not None:
            self.timeline = self.recorder.begin(self.timeline.turn)

    def _begin(self) -> None:
        """Begin an occasion: the plain step has just been sent."""
        self.timed_plain, self.plain = (self.plain, self.recorder.clock.stamp()), None
        self.left = self._turns()
        self.timeline = self.recorder.begin(self.left[0])

    def _turns(self) -> list[StampTurn]:
        if not self.captured:
            return [EVERY_LAYER]
        if self.profile.samples:  # as on the first occasion: those graphs are there
            return sorted({sample.turn for sample in self.profile.samples})
        self.recorder.clock.wait()  # this once: the step to come captures, and is no sample
        self._read_plain()
        return turns_for(OUTSIDE, OF_A_LAYER * self.layers, self.layers, self.profile.plain[0])

    def _read_plain(self) -> None:
        if self.timed_plain is not None:
            self.profile.plain.append(self.recorder.clock.ms(*self.timed_plain))
            self.timed_plain = None

    def _take(self, timeline: Timeline, micro_batches: int) -> None:
        """A profiled step was sent."""
        self.timeline, self.idle = None, True
        if self.recorder.take(timeline):
            self.left.pop(0)
        self._read_plain()
        self.profile.facts["shape"]["micro_batches"] = micro_batches
        if self.floor_ms is not None:
            self.profile.facts["floor_ms"] = self.floor_ms * micro_batches

    def _write(self, folder: Path) -> dict[str, Any]:
        document = self.profile.document()
        try:
            write_file(folder / "profile.json", json.dumps(document) + "\n")
            write_file(folder / "profile-trace.json", json.dumps(self.profile.trace()) + "\n")
        except OSError as error:  # a full disk: the figures are in the log all the same
            document["not_written"] = str(error)
        return document


class Trace(Hook):
    """`trace_steps`: torch's profiler traces some steps of the run into trace.json.gz."""

    def __init__(self) -> None:
        self.trace: StepTrace | None = None

    def start(self, state: RunState) -> None:
        path, device = state.folder / "trace.json.gz", state.session.runtime.device
        self.trace = StepTrace(state.config.run.trace_steps, path, device, state.report.console.note)
        self.trace.__enter__()

    def step_sent(self, state: RunState, micro_batches: int) -> None:
        if self.trace is not None:
            self.trace.step()

    def stop(self, state: RunState) -> None:
        if self.trace is not None:
            self.trace.__exit__(None, None, None)
