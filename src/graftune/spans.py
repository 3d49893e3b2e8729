"""Who owns the time of a step: the code says which phase, layer and operation it is at, and a timeline takes stamps.

    spans.phase("forward")        what follows belongs to this phase; takes no stamp
    spans.layer(3)                and to this layer; takes no stamp
    spans.operation("qkv")        and to this operation: one stamp, which ends the span before it and begins this one

With no timeline each of them is a test for None. Nothing is launched, allocated or synchronised then, and a graph that
is captured has the nodes that it would have without this file. Neighbours share a stamp, so a pass of n spans costs
n + 1 of them; a pair of stamps around every operation was the alternative, at twice the price.

On a CPU a stamp is the host's clock. On a GPU it is a CUDA event. In a captured pass the event is a node of the graph
(`external=True`), recorded anew by every replay. A timeline that is active while a captured callable is called makes
`graph.Captured` capture it once more, with the spans inside, and replay that one: see `Timeline.nested`.

An event costs a captured pass 4 to 7 microseconds, since kernels do not follow each other closely across it. Where a
step is short, only some layers are stamped at a time (`Turn`), and those between them are one span.

Work on a second stream runs beside the spans of the first one: `aside` notes it apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

OTHERS = -1  # in place of a layer


class Name(NamedTuple):
    """Of a span. Layers that another turn stamps are one span: their layer is OTHERS and their operation empty."""

    phase: str
    layer: int | None
    operation: str


class Clock(Protocol):
    """Takes stamps, and says how many milliseconds lie between two."""

    def stamp(self) -> Any: ...
    def ms(self, begin: Any, end: Any) -> float: ...
    def wait(self) -> None:
        """Until every stamp that was taken can be read."""


class HostClock:
    def stamp(self) -> float:
        return time.perf_counter()

    def ms(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3

    def wait(self) -> None: ...


class DeviceClock:
    """By events on the current stream; in a capture they become nodes of the graph."""

    def __init__(self, device: torch.device):
        self.device = device

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def ms(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)


def clock_for(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()


class Turn(NamedTuple):
    """Which layers are stamped: those with layer % of == number."""

    number: int = 0
    of: int = 1

    def details(self, layer: int | None) -> bool:
        return layer is None or layer % self.of == self.number


EVERY_LAYER = Turn()


class Timeline:
    """The spans of one pass, in order, and the captured passes that were replayed within it."""

    def __init__(self, clock: Clock, turn: Turn = EVERY_LAYER):
        self.clock, self.turn = clock, turn
        self.stamps: list[tuple[Name | None, Any]] = []  # from the stamp on the time is the name's; None: nobody's
        self.apart: list[tuple[Name, Any, Any]] = []  # on other streams: begin and end
        self.inner: list[Timeline] = []  # captured passes, one entry a replay
        self.captures = False  # something was captured within it, which takes time: it says nothing of a step
        self._phase = ""
        self._layer: int | None = None
        self._operation = self._before = ""

    def phase(self, name: str, layer: int | None = None) -> None:
        self._phase, self._layer = name, layer

    def layer(self, index: int | None) -> None:
        self._layer = index

    def operation(self, name: str) -> None:
        self._before, self._operation = self._operation, name
        self._switch(self._name(name))

    def back(self) -> None:
        self.operation(self._before)

    def end(self) -> None:
        """Nobody owns what follows."""
        self._switch(None)

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        begin = self.clock.stamp()
        yield
        self.apart.append((self._name(name), begin, self.clock.stamp()))

    def nested(self) -> Timeline:
        """A new timeline for what is captured within this one."""
        return Timeline(self.clock, self.turn)

    def _name(self, operation: str) -> Name:
        if self.turn.details(self._layer):
            return Name(self._phase, self._layer, operation)
        return Name(self._phase, OTHERS, "")

    def _switch(self, name: Name | None) -> None:
        if not self.stamps or self.stamps[-1][0] != name:
            self.stamps.append((name, self.clock.stamp()))


_now: Timeline | None = None


def current() -> Timeline | None:
    return _now


@contextmanager
def recording(timeline: Timeline | None) -> Iterator[None]:
    """Spans go to this timeline, or (None) to none."""
    global _now
    before, _now = _now, timeline
    try:
        yield
    finally:
        _now = before


def phase(name: str, layer: int | None = None) -> None:
    if _now is not None:
        _now.phase(name, layer)


def layer(index: int | None) -> None:
    if _now is not None:
        _now.layer(index)


def operation(name: str) -> None:
    if _now is not None:
        _now.operation(name)


def back() -> None:
    """To the operation before this one: for a part of an operation that does not know whose part it is."""
    if _now is not None:
        _now.back()


def end() -> None:
    if _now is not None:
        _now.end()


def aside(name: str) -> AbstractContextManager[None]:
    """Around work on another stream, which is the current one."""
    return nullcontext() if _now is None or not _now.turn.details(_now._layer) else _now.aside(name)
