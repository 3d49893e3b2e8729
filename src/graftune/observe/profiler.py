"""Profiles steps while they run: with a timeline (spans.py), or with torch's own profiler for a trace.

`profiled` alternates plain steps and steps with a timeline, so that both see the same clocks and data. On a GPU a
profiled step is queued behind plain ones, as the steps of a run are: a step that begins on an idle device would count
the host's time to launch it. Each profiled step is followed by a wait, since a replay of the same graph overwrites its
events.

How many operations are stamped at a time depends on the step: stamps may take STAMPS_SHARE of it. A 1B step of 512
tokens has about 300 operations in 6 ms, so it is profiled in turns of one layer each; an 8B step of 8192 tokens in one.
Each turn is one more capture of the same callables.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from graftune import spans
from graftune.observe.profile import Profile, read
from graftune.spans import EVERY_LAYER, StampTurn, Timeline

UNTRACED = 3  # steps before a trace begins: kernels compile, the graph is captured, clocks settle
STAMP_MS = 0.007  # what an event costs a captured step: 4 to 7 us on an H200, by the gap that it leaves behind it
STAMPS_SHARE = 0.035  # of a step that stamps may take
WARM = 3  # steps before anything is timed: kernels compile, graphs are captured, clocks settle
EAGER = 3  # steps without graphs
OUTSIDE, OF_A_LAYER = 24, 26  # stamps outside of layers and of one layer, about, where they were not counted

Send = Callable[[], None]  # fetches the batches of the next step and sends it


class ProfiledLoop(Protocol):
    """What is profiled: a loop of step/pipeline.py."""

    @property
    def graph(self) -> bool:
        """Whether steps are captured and replayed."""
        ...

    @property
    def ahead(self) -> int:
        """Steps that may be queued on the device."""
        ...

    @property
    def layers(self) -> int: ...
    def uncaptured(self) -> AbstractContextManager[None]: ...
    def discard(self) -> None: ...
    def finished(self, wait: bool = False) -> object: ...


class _Counting:
    """A clock that only counts."""

    def stamp(self) -> int:
        return 0

    def ms(self, begin: int, end: int) -> float:
        return 0.0

    def wait(self) -> None: ...


def profiled(loop: ProfiledLoop, send: Send, device: torch.device, steps: int) -> Profile:
    """At least `steps` profiled steps, as many in every turn. The steps are real: they train."""
    clock = spans.clock_for(device)
    recorder = Recorder(clock)
    profile = recorder.profile
    for _ in range(WARM):
        send()
    turns = _turns(loop, send, clock, profile)
    for turn in turns:
        if loop.graph:
            _timed(recorder, send, turn)  # captures: not a sample
        for _ in range(math.ceil(steps / len(turns))):
            if loop.ahead:
                send()
            began = clock.stamp()
            send()
            ended = clock.stamp()
            _timed(recorder, send, turn)
            profile.plain.append(clock.ms(began, ended))
    loop.finished(wait=True)
    profile.facts["captured"] = loop.graph
    profile.facts["turns"] = len(turns)
    return profile


def _timed(recorder: Recorder, send: Send, turn: StampTurn) -> None:
    timeline = recorder.begin(turn)
    with spans.recording(timeline):
        send()
        timeline.end()
    recorder.take(timeline)


def _turns(loop: ProfiledLoop, send: Send, clock: spans.Clock, profile: Profile) -> list[StampTurn]:
    """One, unless its stamps would take too much of a captured step. Stamps are counted in an eager step, and eager
    steps are timed to see what the graph saves."""
    if not loop.graph:
        return [EVERY_LAYER]
    plain = statistics.median(_plain(send, clock) for _ in range(5))
    counted = Timeline(_Counting())
    layers = loop.layers
    try:
        with loop.uncaptured():
            send()
            for _ in range(EAGER):
                profile.eager.append(_plain(send, clock))
            with spans.recording(counted):
                send()
        clock.wait()
        inside = [name for name, _ in counted.stamps if name is not None and name.layer is not None]
        stamps = len(counted.stamps) - len(inside), len(inside) + 2 * len(counted.apart)
    except torch.OutOfMemoryError:  # the graph's own memory is not free for an eager step
        loop.discard()
        profile.eager.clear()
        profile.facts["eager_note"] = "without graphs a step was not timed: it does not fit beside their memory"
        stamps = OUTSIDE, OF_A_LAYER * layers
    return turns_for(*stamps, layers, plain)


def turns_for(outside: int, inside: int, layers: int, plain_ms: float) -> list[StampTurn]:
    """The fewest whose stamps take no more than their share; at most one a layer. `outside` and `inside`: stamps out of
    layers, which every turn has, and of all layers together. A layer has two borders more, forward and backward."""
    allowed = STAMPS_SHARE * plain_ms / STAMP_MS
    counts = (n for n in range(1, layers + 1) if outside + (inside + 2 * layers * (n > 1)) / n <= allowed)
    count = next(counts, layers)
    return [StampTurn(number, count) for number in range(count)]


def _plain(send: Send, clock: spans.Clock) -> float:
    """Milliseconds of a step on its own, queued behind another."""
    send()
    began = clock.stamp()
    send()
    ended = clock.stamp()
    clock.wait()
    return clock.ms(began, ended)


class Recorder:
    """Takes the samples of a profile while steps are sent. Its timeline begins where the step before ended, so what
    passes until the first batch is there is the phase `load`."""

    def __init__(self, clock: Any, profile: Profile | None = None, most: int | None = None):
        """`most`: samples of each turn that are kept, and plain steps; the oldest ones go. None: all of them."""
        self.clock, self.profile, self.most = clock, profile or Profile(), most

    def begin(self, turn: StampTurn = EVERY_LAYER) -> Timeline:
        timeline = Timeline(self.clock, turn)
        timeline.phase("load")
        timeline.operation("waiting for a batch")
        return timeline

    def take(self, timeline: Timeline) -> bool:
        """The step was sent and its end stamped: it is waited for and, unless it was captured meanwhile, kept."""
        self.clock.wait()
        if not timeline.captures:
            self.profile.samples.append(read(timeline))
            self._drop_oldest(timeline.turn)
        return not timeline.captures

    def _drop_oldest(self, turn: StampTurn) -> None:
        profile = self.profile
        mine = [place for place, sample in enumerate(profile.samples) if sample.turn == turn]
        if self.most is not None and len(mine) > self.most:
            del profile.samples[mine[0]]
            del profile.plain[: -self.most]


class StepTrace:
    """Writes a trace of so many steps, for ui.perfetto.dev, by torch's profiler; 0: none. A run that ends earlier gets
    the steps that there were."""

    def __init__(self, steps: int, path: Path, device: torch.device, said: Callable[[str], None]):
        self.path, self.said, self.sent = path, said, 0
        self.profiler: Any = None
        if steps:
            kinds = torch.profiler.ProfilerActivity
            self.profiler = torch.profiler.profile(
                activities=[kinds.CPU, *([kinds.CUDA] if device.type == "cuda" else [])],
                schedule=torch.profiler.schedule(wait=UNTRACED, warmup=1, active=steps, repeat=1),
                on_trace_ready=self._write,
            )

    def __enter__(self) -> StepTrace:
        if self.profiler is not None:
            self.profiler.start()
        return self

    def step(self) -> None:
        """A step was sent."""
        self.sent += 1
        if self.profiler is not None:
            self.profiler.step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            if self.sent <= UNTRACED + 1:
                self.said(f"no trace: the run had no more than {UNTRACED + 1} steps")

    def _write(self, profiler: Any) -> None:
        if self.sent > UNTRACED + 1:
            try:
                profiler.export_chrome_trace(str(self.path))
            except OSError as error:  # a full disk: the run goes on without its trace
                self.said(f"no trace: {error}")
                return
            self.said(f"trace: {self.path} (open it in ui.perfetto.dev)")
