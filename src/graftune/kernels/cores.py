"""Divides work on a CPU into pieces, each done by one core from beginning to end.

torch divides every operation among its threads, which then wait for each other: twenty operations over a piece are
twenty barriers. If another process uses the same cores, a barrier lasts until the last thread was scheduled, and two
runs that load a model at the same time take many times as long as one after the other. Independent pieces share the
cores without such waits. There are never more threads than `torch.get_num_threads()`.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from graftune.arithmetic import ceil_div
from graftune.kernels import rehearsal

LEAST = 1 << 15  # values of a piece: torch does not divide smaller operations either


def piece_size(values: int, most: int) -> int:
    """How many of these values one core takes at a time, so that every core has work: at most `most`."""
    return max(1, min(most, max(LEAST, ceil_div(values, torch.get_num_threads()))))


def share(work: Callable[[int], None], starts: Sequence[int]) -> None:
    """Call `work(start)` for every start, in any order, on as many cores as torch may use. Raises the first error and
    cancels the calls that have not begun."""
    threads = torch.get_num_threads()
    if min(threads, len(starts)) < 2 or rehearsal.current() is not None:  # a rehearsal counts in one thread
        for start in starts:
            work(start)
        return
    inference = torch.is_inference_mode_enabled()  # a setting of each thread

    def alike(start: int) -> None:
        with torch.inference_mode(inference):
            work(start)

    under_way = [_pool(threads, os.getpid()).submit(alike, start) for start in starts]
    try:
        for done in under_way:
            done.result()
    except BaseException:
        for each in under_way:
            each.cancel()
        wait(under_way)  # running calls write to memory that the caller may free
        raise


@functools.lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """A pool whose threads each let torch use one thread; a forked process makes its own. torch keeps the number for
    each thread, but a new thread starts with the number that was set last anywhere, so the process's own number is
    restored once all threads have started."""
    pool, begun = ThreadPoolExecutor(threads, "graftune-core", _alone), threading.Barrier(threads)
    wait([pool.submit(begun.wait) for _ in range(threads)])
    torch.set_num_threads(threads)
    return pool


def _alone() -> None:
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1
