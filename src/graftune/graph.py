"""Capture and replay of a fixed-shape callable as a CUDA graph. Knows nothing of models.

The first call is the work itself, run eagerly on a side stream: it compiles kernels, builds plans and fills caches, and
it counts. Then the callable is captured, which runs nothing, and every later call replays. So capturing neither loses a
call's effect nor makes it twice. What the callable reads and writes beyond its own temporaries must stay where it is.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

from graftune import graph_nodes


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
        main, (side, ahead) = torch.cuda.current_stream(), _streams(torch.cuda.current_device())
        side.wait_stream(main)
        with torch.cuda.stream(side):
            self.work()
        main.wait_stream(side)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # what the eager call took would lie beside the graph's own memory for good
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        capture(self.work, graph, ahead, self.pool)
        if torch.version.hip is None:
            graph_nodes.without_memsets(graph.raw_cuda_graph())
        graph.instantiate()
        self.graph = graph  # only now: a capture that failed is none


def capture(work: Callable[[], None], graph: torch.cuda.CUDAGraph, stream: Any, pool: Any = None) -> None:
    """`work` into the graph, on the stream; nothing runs."""
    collects = gc.isenabled()
    gc.disable()  # what a collection lets go of may call the driver, which would be the end of the capture
    try:
        # Another thread may be packing the next batch into pinned memory meanwhile: only this thread's calls matter.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()
    except RuntimeError as error:
        if error.__context__ is None:
            raise
        raise error.__context__ from None  # what broke the capture; leaving a broken one fails too, and says nothing
    finally:
        if collects:
            gc.enable()


@functools.cache
def _streams(device: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """One to run on before the capture, and one to capture on: what a callable forks off to others yields to that. The
    same for all, since libraries keep memory for every stream they have seen."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)
