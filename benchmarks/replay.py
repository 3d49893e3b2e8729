"""Work as a CUDA graph, and its time once the clocks have settled."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.measure import synchronise


def sustained(work: Callable[[], Any], device: torch.device, steps: int, sustain: float) -> float:
    """Milliseconds of one replay, median, after `sustain` seconds of replays."""
    if device.type != "cuda":
        work()
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)
    graph = captured(work)
    until = time.perf_counter() + sustain
    while time.perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * steps + 1)]
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    synchronise(device)
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Run until it is warm, then captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        begin = time.perf_counter()
        for _ in range(3):
            work()
            torch.cuda.synchronize()
            if time.perf_counter() - begin > 2:  # warm enough, and dear
                break
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
