"""Capture and replay of a fixed-shape callable as a CUDA graph. Knows nothing of models.

The first call is the work itself, run eagerly on a side stream: it compiles kernels, builds plans and fills caches, and
it counts. Then the callable is captured, which runs nothing, and every later call replays. So capturing neither loses a
call's effect nor makes it twice. What the callable reads and writes beyond its own temporaries must stay where it is.
"""

from __future__ import annotations

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
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            self.work()
        main.wait_stream(side)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # what the eager call took would lie beside the graph's own memory for good
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # What a callable forks off to another stream yields to what it does on its own.
        ahead = torch.cuda.Stream(priority=-1)
        # Another thread may be packing the next batch into pinned memory meanwhile: only this thread's calls matter.
        with torch.cuda.graph(graph, pool=self.pool, stream=ahead, capture_error_mode="thread_local"):
            self.work()
        if torch.version.hip is None:
            graph_nodes.without_memsets(graph.raw_cuda_graph())
        graph.instantiate()
        self.graph = graph  # only now: a capture that failed is none
