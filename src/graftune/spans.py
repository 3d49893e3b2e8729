"""Attributes the time of a step to phases, layers and operations, by stamps on a timeline.

Kernels name their own operation (`launch.operation` in kernels/launch.py), so a step has few calls of this file:

    spans.phase("forward")        what follows belongs to this phase; takes no stamp
    spans.layer(3)                and to this layer; takes no stamp
    spans.operation("router")     starts this operation, for torch's own functions: one stamp
    spans.product("qkv")          the name of the matrix products that follow: a kernel does not know which one it is
    with spans.covering("final norm"):    everything inside is this operation, whatever its kernels are called

An operation lasts until the next one starts: a stamp ends one span and begins the next, so a pass of n spans costs
n + 1 of them; a pair of stamps around every operation was the alternative, at twice the price. Without a timeline each
call is a test for None: nothing is launched, allocated or synchronised, and a captured graph has no additional node.

On a CPU a stamp is the host's clock. On a GPU it is a CUDA event. In a captured pass the event is a node of the graph
(`external=True`), recorded again by every replay. A timeline that is active while a captured callable is called makes
`graph.Captured` capture it once more, with the spans inside, and replay that one.

An event costs a captured pass 4 to 7 microseconds, since kernels do not follow each other closely across it. Where a
step is short, only some layers are stamped at a time (`StampTurn`), and those between them are one span.

Work on a second stream runs beside the spans of the first one: `aside` (see `graph.on`) records it separately.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from graftune.private import find

OTHERS = -1  # in place of a layer
PRODUCT = ""  # the operation of a matrix product, whose name is the last one given to `product`


class Name(NamedTuple):
    """The name of a span. Layers that another turn stamps are one span with layer OTHERS and an empty operation."""

    phase: str
    layer: int | None
    operation: str


class Clock(Protocol):
    """Takes stamps and measures the milliseconds between two of them."""

    def stamp(self) -> Any: ...
    def ms(self, begin: Any, end: Any) -> float: ...
    def wait(self) -> None:
        """Wait until every stamp that was taken can be read."""


class HostClock:
    def stamp(self) -> float:
        return time.perf_counter()

    def ms(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3

    def wait(self) -> None: ...


class DeviceClock:
    """Stamps are events on the current stream; in a capture they become nodes of the graph."""

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


class StampTurn(NamedTuple):
    """Which layers are stamped: those with layer % of == number."""

    number: int = 0
    of: int = 1

    def details(self, layer: int | None) -> bool:
        return layer is None or layer % self.of == self.number


EVERY_LAYER = StampTurn()


class Timeline:
    """The spans of one pass, in order, and the captured passes that were replayed within it."""

    def __init__(self, clock: Clock, turn: StampTurn = EVERY_LAYER):
        self.clock, self.turn = clock, turn
        self.stamps: list[tuple[Name | None, Any]] = []  # the span that begins at the stamp; None: no span
        self.apart: list[tuple[Name, Any, Any]] = []  # on other streams: begin and end
        self.inner: list[Timeline] = []  # captured passes, one entry a replay
        self.captures = False  # something was captured within it, which takes time: it is not a sample of a step
        self._phase = ""
        self._layer: int | None = None
        self._product = "product"
        self._covered = False

    def phase(self, name: str, layer: int | None = None, operation: str | None = None) -> None:
        self._phase, self._layer = name, layer
        if operation is not None:
            self.operation(operation)

    def layer(self, index: int | None) -> None:
        self._layer = index

    def product(self, name: str) -> None:
        self._product = name

    def operation(self, name: str) -> None:
        if not self._covered:
            self._switch(self._name(name or self._product))

    def end(self) -> None:
        self._switch(None)

    @contextmanager
    def covering(self, name: str) -> Iterator[None]:
        self.operation(name)
        with self._cover():
            yield

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """The operations inside run on another stream: they take no stamp of this one."""
        detailed = self.turn.details(self._layer)
        begin = self.clock.stamp() if detailed else None
        with self._cover():
            yield
        if detailed:
            self.apart.append((self._name(name), begin, self.clock.stamp()))

    @contextmanager
    def _cover(self) -> Iterator[None]:
        before, self._covered = self._covered, True
        try:
            yield
        finally:
            self._covered = before

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
    """Record the spans inside on this timeline, or (None) on none."""
    global _now
    before, _now = _now, timeline
    try:
        yield
    finally:
        _now = before


def phase(name: str, layer: int | None = None, operation: str | None = None) -> None:
    if _now is not None:
        _now.phase(name, layer, operation)


def layer(index: int | None) -> None:
    if _now is not None:
        _now.layer(index)


def operation(name: str) -> None:
    if _now is not None:
        _now.operation(name)


def product(name: str) -> None:
    if _now is not None:
        _now.product(name)


def end() -> None:
    if _now is not None:
        _now.end()


def covering(name: str) -> AbstractContextManager[None]:
    return nullcontext() if _now is None else _now.covering(name)


def aside(name: str) -> AbstractContextManager[None]:
    """Around work on another stream, which is the current one."""
    return nullcontext() if _now is None else _now.aside(name)


_profiler_runs = find("torch.autograd._profiler_enabled")


def marked(name: str) -> AbstractContextManager[Any]:
    """`with marked("evaluate"):` is the range "graftune: evaluate" in a trace of torch's profiler: for the points where
    the host waits (the capture, evaluations, answers, checkpoints, the device when it is two steps behind)."""
    if not _profiler_runs():
        return nullcontext()
    return torch.profiler.record_function(f"graftune: {name}")
