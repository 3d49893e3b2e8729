"""Capture and replay of a fixed-shape callable as a CUDA graph. Knows nothing of models.

The first call runs the callable eagerly, on the stream that will capture. It compiles kernels, builds plans, fills
caches and lets libraries set up the stream (cuDNN keeps streams of its own for every priority), and its effect counts.
Then the callable is captured, which runs nothing, and every later call replays. So the effect of each call happens
exactly once. The tensors that the callable reads and writes beyond its own temporaries must keep their addresses.

A profile has to time replays, not eager calls: with a timeline active the same callable is captured once more, with its
spans as event nodes (spans.py), and that graph is replayed instead. The graph of all other calls has no such nodes.

This file also provides streams and events, by device: on a CPU, and for meta tensors, on which a step is rehearsed,
they are objects that do nothing.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from graftune import spans

_unfinished: list[torch.cuda.CUDAGraph] = []  # whose capture broke: torch's allocator goes on querying them


class Captured:
    """`work`, replayed from its second call on. With `enabled` false it simply runs. `collect`: whether garbage is
    collected before the capture, which takes up to a tenth of a second and frees memory that the graph could use."""

    def __init__(self, work: Callable[[], object], *, enabled: bool = True, pool: Any = None, collect: bool = True):
        self.work, self.enabled, self.pool, self.collect = work, enabled, pool, collect
        self.graph: torch.cuda.CUDAGraph | None = None
        self.timed: dict[spans.StampTurn, tuple[torch.cuda.CUDAGraph, spans.Timeline]] = {}

    def __call__(self) -> None:
        if not self.enabled:
            self.work()
        elif self.graph is None:
            self._first()
        elif (timeline := spans.current()) is None:
            self.graph.replay()
        else:
            self._replay_timed(timeline)

    def _first(self) -> None:
        # High priority: work that the callable forks off to another stream yields to its work on this one.
        main, side = torch.cuda.current_stream(), stream("capture", priority=-1)
        torch.cuda.empty_cache()  # this stream could not reuse memory that was freed on other streams
        side.wait_stream(main)
        spans.end()
        with spans.recording(None):  # this graph is for all calls that are not timed
            with torch.cuda.stream(side):
                self.work()
            main.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            capture(self.work, graph, side, self.pool, self.collect)
        self.graph = graph  # only now: it stays None if the capture failed

    def _replay_timed(self, timeline: spans.Timeline) -> None:
        timeline.end()
        if timeline.turn not in self.timed:
            graph, inner = torch.cuda.CUDAGraph(), spans.Timeline(timeline.clock, timeline.turn)

            def work() -> None:
                self.work()
                inner.end()

            with spans.recording(inner):
                capture(work, graph, stream("capture", priority=-1), self.pool)
            self.timed[timeline.turn] = graph, inner
            timeline.captures = True
        graph, inner = self.timed[timeline.turn]
        graph.replay()
        timeline.inner.append(inner)


def capture(
    work: Callable[[], object],
    graph: torch.cuda.CUDAGraph,
    on: torch.cuda.Stream,
    pool: Any = None,
    collect: bool = True,
) -> None:
    """Capture `work` into the graph, on a stream; nothing runs. An error that breaks the capture is raised as it is."""
    torch.cuda.synchronize()
    if collect:
        gc.collect()
    torch.cuda.empty_cache()  # cached memory of eager calls would stay beside the graph's own memory for good
    collects = gc.isenabled()
    gc.disable()  # an object that a collection frees may call the driver, which would break the capture
    try:
        with torch.cuda.stream(on):
            _unfinished.append(graph)
            # Another thread may be packing the next batch into pinned memory meanwhile: only this thread's calls count.
            graph.capture_begin(pool=pool or torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # ending a broken capture fails too, with a less useful message
                    graph.capture_end()
                raise
            graph.capture_end()
            _unfinished.pop()
    finally:
        if collects:
            gc.enable()


class NullStream:
    """A stream of meta tensors or of the CPU: it has an identity, and work on it runs in order with all other."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self.cuda_stream = next(self._numbers)

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class NullEvent:
    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Null:
    """Which stream is current for meta tensors, and whether it captures."""

    current = NullStream()
    capturing = False


def stream(name: str, device: torch.device | None = None, priority: int = 0) -> Any:
    """The process's stream of this name, the same one in every run: libraries keep memory for every stream they have
    seen, and torch hands out 32 streams in turn, so that two that should be separate could be the same. For a device
    without streams, a new NullStream."""
    if _in_order(device):
        return NullStream()
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    return _stream(index, name, priority)


@functools.cache
def _stream(device: int, name: str, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)


def current_stream(device: torch.device | None = None) -> Any:
    return _Null.current if _in_order(device) else torch.cuda.current_stream(device)


def event(device: torch.device | None = None) -> Any:
    return NullEvent() if _in_order(device) else torch.cuda.Event()


def wait(device: torch.device, *for_these: Any, operation: str) -> None:
    """Let the current stream wait for streams and events; in a profile the wait is an operation."""
    spans.operation(operation)
    main = current_stream(device)
    for one in for_these:
        if isinstance(one, NullStream | torch.cuda.Stream):
            main.wait_stream(one)
        else:
            main.wait_event(one)


@contextmanager
def on(side: Any, operation: str = "") -> Iterator[None]:
    """Work inside goes to this stream; a profile lists it under the operation's name, apart from the main stream's."""
    if not isinstance(side, NullStream):
        with torch.cuda.stream(side), spans.aside(operation):
            yield
        return
    before, _Null.current = _Null.current, side
    try:
        with spans.aside(operation):
            yield
    finally:
        _Null.current = before


def is_capturing(device: torch.device | None = None) -> bool:
    return _Null.capturing if _in_order(device) else torch.cuda.is_current_stream_capturing()


@contextmanager
def null_capture(side: NullStream) -> Iterator[None]:
    """Stands in for the capture of work on meta tensors: inside, `is_capturing` is true."""
    _Null.capturing = True
    try:
        with on(side):
            yield
    finally:
        _Null.capturing = False


def _in_order(device: torch.device | None) -> bool:
    """Whether a device has no streams."""
    return device is not None and device.type in ("meta", "cpu")
