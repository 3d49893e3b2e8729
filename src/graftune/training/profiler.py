"""Profiles training steps while they run, for `graftune profile` and for `profile_every`; and torch's own trace.

A profiled step is recorded on a timeline (spans.py). On a GPU it is queued behind plain ones, like the steps of a run:
a step that begins on an idle device would count the host's time to launch it. Each profiled step is followed by a wait,
since a replay of the same graph overwrites its events. Plain steps are timed in between, so that both see the same
clocks and data.

How many operations are stamped at a time depends on the step: stamps may take STAMPS_SHARE of it. A 1B step of 512
tokens has about 300 operations in 6 ms, so it is profiled in turns of one layer each; an 8B step of 8192 tokens in one.
The first profiled step of a turn captures the step once more and is discarded; its graphs are kept.

In a run, `profile_every` sets how often an occasion begins: a plain step is timed, then a step is profiled for each
turn, and between two profiled steps one passes untimed, because the wait leaves the device idle. An occasion that would
begin during another one is left out. The profile covers the latest occasions, so that its size and the time to write it
do not grow with the run.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from graftune import spans
from graftune.arithmetic import ceil_div
from graftune.data.pack import Capacities
from graftune.io.files import write_file
from graftune.observe.profile import Profile, read
from graftune.session import SessionParts
from graftune.spans import EVERY_LAYER, Clock, StampTurn, Timeline
from graftune.step.pipeline import Pipeline
from graftune.training.hooks import Hook, RunState

UNTRACED = 3  # steps before a trace begins: kernels compile, the graph is captured, clocks become steady
STAMP_MS = 0.007  # time that an event adds to a captured step: 4 to 7 us on an H200, measured as the gap after it
STAMPS_SHARE = 0.035  # share of a step's time that stamps may take
WARM = 3  # steps before anything is timed: kernels compile, graphs are captured, clocks become steady
WARM_RUN = 5  # the same, in a run
EAGER = 3  # steps without graphs
OUTSIDE, OF_A_LAYER = 24, 26  # approximate numbers of stamps: outside of layers, and in one layer
BESIDE = {"evaluate": "evaluation", "checkpoint": "checkpoint"}  # work whose time a profile shows beside steps
MOST = 20  # samples of each turn that a run keeps: a document is made of them while the run waits

Send = Callable[[], None]  # fetches the batches of the next step and sends it


class Recorder:
    """Takes the samples of a profile while steps are sent."""

    def __init__(self, clock: Clock, profile: Profile | None = None, most: int | None = None):
        """`most`: how many samples of each turn, and how many plain steps, are kept, the latest ones. None: all."""
        self.clock, self.profile, self.most = clock, profile or Profile(), most

    @contextmanager
    def step(self, turn: StampTurn = EVERY_LAYER) -> Iterator[None]:
        timeline = self.begin(turn)
        with spans.recording(timeline):
            yield
            timeline.end()
        self.take(timeline)

    def begin(self, turn: StampTurn) -> Timeline:
        """A timeline that begins where the previous step ended; the time until the first batch is its phase `load`."""
        timeline = Timeline(self.clock, turn)
        timeline.phase("load", operation="waiting for a batch")
        return timeline

    def take(self, timeline: Timeline) -> bool:
        """Wait for a step whose end is stamped, and keep it; False if it was captured meanwhile and is discarded."""
        self.clock.wait()
        if timeline.captures:
            return False
        profile = self.profile
        profile.samples.append(read(timeline))
        same = [place for place, sample in enumerate(profile.samples) if sample.turn == timeline.turn]
        if self.most is not None and len(same) > self.most:
            del profile.samples[same[0]]
            del profile.plain[: -self.most]
        return True


def profiled(loop: Pipeline, send: Send, device: torch.device, steps: int) -> Profile:
    """Profile at least `steps` steps, equally many in every turn. The steps are real: they train."""
    clock = spans.clock_for(device)
    recorder = Recorder(clock)
    profile = recorder.profile
    for _ in range(WARM):
        send()
    turns = _turns(loop, send, clock, profile)
    for turn in turns:
        if loop.graph:
            with recorder.step(turn):  # captures: not a sample
                send()
        for _ in range(math.ceil(steps / len(turns))):
            if loop.steps_ahead:
                send()
            began = clock.stamp()
            send()
            ended = clock.stamp()
            with recorder.step(turn):
                send()
            profile.plain.append(clock.ms(began, ended))
    loop.finished(wait=True)
    profile.facts["captured"] = loop.graph
    profile.facts["turns"] = len(turns)
    return profile


def _turns(loop: Pipeline, send: Send, clock: Clock, profile: Profile) -> list[StampTurn]:
    """One turn, unless its stamps would take too much of a captured step. Also times eager steps, to show what the
    graph saves."""
    if not loop.graph:
        return [EVERY_LAYER]
    plain = statistics.median(_plain(send, clock) for _ in range(5))
    try:
        with loop.uncaptured():
            send()
            for _ in range(EAGER):
                profile.eager.append(_plain(send, clock))
    except torch.OutOfMemoryError:  # an eager step does not fit beside the graph's memory
        loop.discard()
        profile.eager.clear()
        profile.facts["eager_note"] = "without graphs a step was not timed: it does not fit beside their memory"
    return turns_for(loop.layers, plain)


def turns_for(layers: int, plain_ms: float) -> list[StampTurn]:
    """The fewest turns whose stamps take no more than STAMPS_SHARE of a step; at most one a layer. Every turn has the
    stamps outside of layers. With several turns, each layer has two more stamps, at its forward and backward border."""
    allowed = STAMPS_SHARE * plain_ms / STAMP_MS
    counts = (n for n in range(1, layers + 1) if OUTSIDE + (OF_A_LAYER + 2 * (n > 1)) * layers / n <= allowed)
    count = next(counts, layers)
    return [StampTurn(number, count) for number in range(count)]


def _plain(send: Send, clock: Clock) -> float:
    """Milliseconds of a step on its own, queued behind another."""
    send()
    began = clock.stamp()
    send()
    ended = clock.stamp()
    clock.wait()
    return clock.ms(began, ended)


def facts_of(parts: SessionParts, shape: Capacities | None) -> dict[str, Any]:
    """The facts of the machine and of the model in a profile."""
    settings, runtime = parts.config.train, parts.runtime
    names = ("tokens_per_step", "tokens_per_micro_batch")
    found: dict[str, Any] = {name: getattr(settings, name) for name in names}
    if shape is not None:
        found |= {"documents": shape.max_docs, "longest": shape.longest, "response_rows": shape.max_rows}
    return {
        "device": runtime.device.type,
        "gpu": runtime.describe(why=False),
        "model": parts.base.name,
        "method": settings.method,
        "recompute": settings.recompute,
        "shape": found,
    }


class ProfiledSteps(Hook):
    """`profile_every`, for runs of one process: with several ranks, a capture on one of them would delay the others."""

    def __init__(self, parts: SessionParts, shape: Capacities | None, floor_ms: float | None = None):
        loop, self.layers = parts.pipeline, len(parts.base.spec.layers)
        self.captured = loop.graph
        self.floor_ms = floor_ms
        facts = facts_of(parts, shape) | {"captured": self.captured}
        self.profile = Profile(facts=facts)
        self.recorder = Recorder(spans.clock_for(parts.runtime.device), self.profile, MOST)
        self.timeline: Timeline | None = None  # of the step to come, if it is profiled
        self.occasion: Generator[None, int, None] | None = None
        self.disturbed = False  # the device did other work than steps since the occasion began

    def start(self, state: RunState) -> None:
        every, least = state.config.run.profile_every, max(WARM_RUN + 2, state.progress.step + 3)
        if (first := ceil_div(least, every) * every) > state.total:
            state.report.console.warn(
                f"profile_every is {every}: the run ends at step {state.total}, before step {first} is profiled"
            )

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """A context in which the trainer sends each step to the device."""
        if self.timeline is None:
            yield
            return
        with spans.recording(self.timeline):
            yield
            self.timeline.end()

    def step_sent(self, state: RunState, micro_batches: int) -> None:
        """Begin an occasion two steps before a profiled one, or go on with it."""
        step, every = state.progress.step, state.config.run.profile_every
        if self.occasion is not None:
            try:
                self.occasion.send(micro_batches)
            except StopIteration:
                self.occasion = None
        elif step >= WARM_RUN and (step + 2) % every == 0:
            self.occasion = self._occasion(state)
            next(self.occasion)

    def paused(self, state: RunState, work: str, seconds: float) -> None:
        """Discard the sample, because the device did something else meanwhile."""
        if work in BESIDE:
            self.profile.beside[BESIDE[work]] = seconds * 1e3
        self.disturbed = True
        if self.timeline is not None:
            self.timeline = self.recorder.begin(self.timeline.turn)

    def _occasion(self, state: RunState) -> Generator[None, int, None]:
        """Time a plain step, profile a step for each turn, and write the documents into the folder. Each `yield` lasts
        for one step of the run, and returns the number of its micro-batches."""
        clock, profile, self.disturbed = self.recorder.clock, self.profile, False
        plain = [clock.stamp()]
        yield
        if self.disturbed:
            return
        plain.append(clock.stamp())
        turns = self._turns(plain)
        while turns:
            self.timeline = self.recorder.begin(turns[0])
            micro_batches = yield
            timeline, self.timeline = self.timeline, None
            if self.recorder.take(timeline):
                turns.pop(0)
            if plain:
                profile.plain.append(clock.ms(*plain))
                plain.clear()
            profile.facts["shape"]["micro_batches"] = micro_batches
            if self.floor_ms is not None:
                profile.facts["floor_ms"] = self.floor_ms * micro_batches
            if turns:
                yield  # the wait for the profiled step has left the device idle: one more passes untimed
        state.report.profiled(self._write(state.folder), state.progress.step)

    def _turns(self, plain: Sequence[Any]) -> list[StampTurn]:
        """`plain`: the stamps around a plain step."""
        if not self.captured:
            return [EVERY_LAYER]
        if self.profile.samples:  # the same turns as on the first occasion, whose graphs exist
            return sorted({sample.turn for sample in self.profile.samples})
        self.recorder.clock.wait()  # leaves the device idle, but the next step captures and is discarded anyway
        return turns_for(self.layers, self.recorder.clock.ms(*plain))

    def _write(self, folder: Path) -> dict[str, Any]:
        document = self.profile.document()
        try:
            write_file(folder / "profile.json", json.dumps(document) + "\n")
            write_file(folder / "profile-trace.json", json.dumps(self.profile.trace()) + "\n")
        except OSError as error:  # a full disk: the figures are in the log all the same
            document["not_written"] = str(error)
        return document


class Trace(Hook):
    """`trace_steps`: torch's profiler traces some steps of the run into trace.json.gz, for ui.perfetto.dev. If the run
    ends earlier, the trace has the steps up to its end."""

    def __init__(self) -> None:
        self.sent = 0
        self.profiler: Any = None

    def start(self, state: RunState) -> None:
        kinds, steps = torch.profiler.ProfilerActivity, state.config.run.trace_steps
        path, note = state.folder / "trace.json.gz", state.report.console.note

        def write(profiler: Any) -> None:
            if self.sent <= UNTRACED + 1:
                return
            try:
                profiler.export_chrome_trace(str(path))
            except OSError as error:  # a full disk: the run goes on without its trace
                note(f"no trace: {error}")
                return
            note(f"trace: {path} (open it in ui.perfetto.dev)")

        self.profiler = torch.profiler.profile(
            activities=[kinds.CPU, *([kinds.CUDA] if state.parts.runtime.device.type == "cuda" else [])],
            schedule=torch.profiler.schedule(wait=UNTRACED, warmup=1, active=steps, repeat=1),
            on_trace_ready=write,
        )
        self.profiler.start()

    def step_sent(self, state: RunState, micro_batches: int) -> None:
        self.sent += 1
        self.profiler.step()

    def stop(self, state: RunState) -> None:
        if self.profiler is None:  # the run ended before its first step
            return
        self.profiler.stop()
        if self.sent <= UNTRACED + 1:
            state.report.console.note(f"no trace: the run had no more than {UNTRACED + 1} steps")
