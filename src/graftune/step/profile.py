"""Steps profiled as they are run: plain, then with a timeline, in turn, so that both have the same clocks and data.

On a GPU a profiled step is queued behind plain ones, as the steps of a run are: a step that begins on an idle device
would count the host's time to launch it. Each profiled step is followed by a wait, since a replay of the same graph
overwrites its events.

How many operations are stamped at a time depends on the step: stamps may take STAMPS_SHARE of it. A 1B step of 512
tokens has about 300 operations in 6 ms, so it is profiled in turns of one layer each; an 8B step of 8192 tokens in one.
Each turn is one more capture of the same callables.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch

from graftune import spans
from graftune.observe.profile import Profile, Recorder
from graftune.spans import EVERY_LAYER, Timeline, Turn
from graftune.step.pipeline import DeviceLoop, Loop

STAMP_MS = 0.007  # what an event costs a captured step: 4 to 7 us on an H200, by the gap that it leaves behind it
STAMPS_SHARE = 0.035  # of a step that stamps may take
WARM = 3  # steps before anything is timed: kernels compile, graphs are captured, clocks settle
EAGER = 3  # steps without graphs
OUTSIDE, OF_A_LAYER = 24, 26  # stamps outside of layers and of one layer, about, where nobody has counted

Send = Callable[[], None]  # fetches the batches of the next step and sends it


class _Counting:
    """A clock that only counts."""

    def stamp(self) -> int:
        return 0

    def ms(self, begin: int, end: int) -> float:
        return 0.0

    def wait(self) -> None: ...


def profiled(loop: Loop, send: Send, device: torch.device, steps: int) -> Profile:
    """At least `steps` profiled steps, as many in every turn. The steps are real: they train."""
    clock = spans.clock_for(device)
    recorder = Recorder(clock)
    profile = recorder.profile
    for _ in range(WARM):
        send()
    turns = _turns(loop, send, clock, profile)
    queued = isinstance(loop, DeviceLoop)
    captured = isinstance(loop, DeviceLoop) and loop.graph
    for turn in turns:
        if captured:
            _timed(recorder, send, turn)  # captures, and is no sample
        for _ in range(math.ceil(steps / len(turns))):
            if queued:
                send()
            began = clock.stamp()
            send()
            ended = clock.stamp()
            _timed(recorder, send, turn)
            profile.plain.append(clock.ms(began, ended))
    loop.finished(wait=True)
    profile.facts["captured"] = captured
    profile.facts["turns"] = len(turns)
    return profile


def _timed(recorder: Recorder, send: Send, turn: Turn) -> None:
    timeline = recorder.begin(turn)
    with spans.recording(timeline):
        send()
        timeline.end()
    recorder.take(timeline)


def _turns(loop: Loop, send: Send, clock: spans.Clock, profile: Profile) -> list[Turn]:
    """One, unless its stamps would take too much of a captured step. Eager steps, by which stamps are counted, also
    say what the graph saves."""
    if not isinstance(loop, DeviceLoop) or not loop.graph:
        return [EVERY_LAYER]
    plain = statistics.median(_plain(send, clock) for _ in range(5))
    counted = Timeline(_Counting())
    layers = len(loop.work.decoder.blocks)
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
        loop.work.discard()
        profile.eager.clear()
        profile.facts["eager_note"] = "without graphs a step was not timed: it does not fit beside their memory"
        stamps = OUTSIDE, OF_A_LAYER * layers
    return turns_for(*stamps, layers, plain)


def turns_for(outside: int, inside: int, layers: int, plain_ms: float) -> list[Turn]:
    """The fewest whose stamps take no more than their share; at most one a layer. `outside` and `inside`: stamps out of
    layers, which every turn has, and of all layers together. A layer has two borders more, forward and backward."""
    allowed = STAMPS_SHARE * plain_ms / STAMP_MS
    counts = (n for n in range(1, layers + 1) if outside + (inside + 2 * layers * (n > 1)) / n <= allowed)
    count = next(counts, layers)
    return [Turn(number, count) for number in range(count)]


def _plain(send: Send, clock: spans.Clock) -> float:
    """Milliseconds of a step on its own, queued behind another."""
    send()
    began = clock.stamp()
    send()
    ended = clock.stamp()
    clock.wait()
    return clock.ms(began, ended)
