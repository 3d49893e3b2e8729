"""`profile_every`: some steps of a run are profiled while it trains, every so many.

The step before them is timed plain. A profiled step is waited for, which leaves the device idle, so between two of them
one step passes untimed: like the steps of a run each begins while the one before it computes. On a GPU the first
profiled step of a turn (observe/profiler.py) captures the step once more and is no sample; its graphs are kept, so that
later occasions only replay them. An occasion that would begin while another is under way is left out. The profile is of
the latest occasions: what is kept, and the time that a document takes, does not grow with the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graftune import spans
from graftune.data.pack import Capacities
from graftune.io.files import write_file
from graftune.observe.profile import Profile
from graftune.observe.profiler import OF_A_LAYER, OUTSIDE, Recorder, turns_for
from graftune.session import Session
from graftune.spans import EVERY_LAYER, StampTurn, Timeline
from graftune.step.pipeline import BaseLoop
from graftune.training import floors

WARM = 5  # steps of a run before the first that is profiled
MOST = 20  # samples of each turn that are kept: a document is made of them while the run waits


def facts_of(session: Session, shape: Capacities | None) -> dict[str, Any]:
    """What a profile says of the machine and of the model, beside its times."""
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


class ProfiledSteps:
    """Told of every step that is sent; `every` 0: none is profiled."""

    def __init__(self, every: int, folder: Path, loop: BaseLoop, session: Session, shape: Capacities | None):
        self.every, self.folder, self.loop, self.layers = every, folder, loop, len(session.base.spec.layers)
        self.captured = loop.graph
        self.floor_ms = floors.known(session, shape) if every else None
        facts = facts_of(session, shape) | {"captured": self.captured}
        self.recorder = Recorder(spans.clock_for(session.runtime.device), Profile(facts=facts), MOST)
        self.left: list[StampTurn] = []  # of this occasion
        self.timeline: Timeline | None = None
        self.plain: Any = None  # the stamp ahead of a step that is timed plain
        self.timed_plain: tuple[Any, Any] | None = None  # both stamps of one, which are not read yet
        self.idle = False  # the device has been waited for since the last step

    @property
    def profile(self) -> Profile:
        return self.recorder.profile

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step that is sent."""
        if self.timeline is None:
            yield
            return
        with spans.recording(self.timeline):
            yield
            self.timeline.end()

    def sent(self, step: int, micro_batches: int) -> dict[str, Any] | None:
        """`step` was sent. When the last one of an occasion is done: the document, which is in the folder."""
        if not self.every:
            return None
        if self.timeline is not None:
            self._take(self.timeline, micro_batches)
            return None if self.left else self._written()
        was_idle, self.idle = self.idle, False
        if self.left and was_idle:
            self.timeline = self.recorder.begin(self.left[0])
        elif self.plain is not None:
            self._begin()
        elif step >= WARM and (step + 2) % self.every == 0:
            self.plain = self.recorder.clock.stamp()
        return None

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """Around an evaluation or a checkpoint, which end with the host having waited for the device."""
        began = time.perf_counter()
        yield
        if self.every:
            self.profile.beside[name] = (time.perf_counter() - began) * 1e3
        self.interrupted()

    def interrupted(self) -> None:
        """Something else than a step was done: its time is no step's."""
        self.plain = None
        if self.timeline is not None:
            self.timeline = self.recorder.begin(self.timeline.turn)

    def _begin(self) -> None:
        """An occasion: the plain step has just been sent."""
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

    def _written(self) -> dict[str, Any]:
        document = self.profile.document()
        try:
            write_file(self.folder / "profile.json", json.dumps(document) + "\n")
            write_file(self.folder / "profile-trace.json", json.dumps(self.profile.trace()) + "\n")
        except OSError as error:  # a full disk: the figures are in the log all the same
            document["not_written"] = str(error)
        return document
