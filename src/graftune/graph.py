"""Capture and replay of a fixed-shape callable as a CUDA graph. Knows nothing of models.

The first call is the work itself, run eagerly on the stream that captures: it compiles kernels, builds plans and fills
caches, libraries get to know the stream (cuDNN keeps streams of its own for every priority), and it counts. Then the
callable is captured, which runs nothing, and every later call replays. So capturing neither loses a call's effect nor
makes it twice. What the callable reads and writes beyond its own temporaries must stay where it is.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_unfinished: list[torch.cuda.CUDAGraph] = []  # torch's allocator asks those whose capture broke for good


class Captured:
    """`work`, replayed from its second call on. With `enabled` false it simply runs."""

    def __init__(self, work: Callable[[], None], *, enabled: bool = True, pool: Any = None):
        self.work, self.enabled, self.pool = work, enabled, pool
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self.enabled:
            self.work()
        elif self.graph is None:
            self._first()
        else:
            self.graph.replay()

    def _first(self) -> None:
        # Before others: what a callable forks off to another stream yields to what it does on its own.
        main, ahead = torch.cuda.current_stream(), stream("capture", priority=-1)
        torch.cuda.empty_cache()  # what other streams have let go of, this one could not take
        ahead.wait_stream(main)
        with torch.cuda.stream(ahead):
            self.work()
        main.wait_stream(ahead)
        graph = torch.cuda.CUDAGraph()
        capture(self.work, graph, ahead, self.pool)
        self.graph = graph  # only now: a capture that failed is none


def capture(work: Callable[[], None], graph: torch.cuda.CUDAGraph, on: torch.cuda.Stream, pool: Any = None) -> None:
    """`work` into the graph, on a stream; nothing runs. What breaks a capture is what is raised."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()  # what an eager call took would lie beside the graph's own memory for good
    collects = gc.isenabled()
    gc.disable()  # what a collection lets go of may call the driver, which would be the end of the capture
    try:
        with torch.cuda.stream(on):
            _unfinished.append(graph)
            # Another thread may be packing the next batch into pinned memory meanwhile: only this thread's calls count.
            graph.capture_begin(pool=pool or torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # leaving a broken capture fails as well, and says less
                    graph.capture_end()
                raise
            graph.capture_end()
            _unfinished.pop()
    finally:
        if collects:
            gc.enable()


def stream(name: str, device: torch.device | None = None, priority: int = 0) -> torch.cuda.Stream:
    """The process's stream of this name. Every run has the same ones: libraries keep memory for every stream they have
    seen, and of torch's, which are 32 in turn, two that are meant to be apart may be one."""
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    return _stream(index, name, priority)


@functools.cache
def _stream(device: int, name: str, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)
