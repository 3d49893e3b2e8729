"""Work on a CPU in pieces, each done by one core from beginning to end.

torch divides every operation among its threads, which then wait for each other: twenty operations over a piece are
twenty barriers. Where another process wants the same cores, a barrier lasts until the last thread had its turn, and
two runs that load a model at once take many times as long as one after the other. Pieces that need nothing of each
other share the cores as any two programs do. There are never more threads than `torch.get_num_threads()`.
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

LEAST = 1 << 15  # values of a piece: torch does not divide operations over fewer, and a thread would not pay


def piece_size(values: int, most: int) -> int:
    """How many of so many values one core takes at a time, so that all cores have some: at most `most`."""
    return max(1, min(most, max(LEAST, ceil_div(values, torch.get_num_threads()))))


def share(work: Callable[[int], None], starts: Sequence[int]) -> None:
    """`work(start)` for every start, in any order, on as many cores as torch may use. The first error is raised, and
    what has not begun by then is left out."""
    threads = torch.get_num_threads()
    if min(threads, len(starts)) < 2 or rehearsal.current() is not None:  # whose counting is this thread's own
        for start in starts:
            work(start)
        return
    inference = torch.is_inference_mode_enabled()  # which each thread has by itself

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
        wait(under_way)  # they write where the caller may free memory
        raise


@functools.lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads in each of which torch has one; a process that was forked has none of its parent's. torch counts for each
    thread by itself, but a thread takes over the last number set by anyone when it first asks: the process's own is put
    back once all have asked."""
    pool, begun = ThreadPoolExecutor(threads, "graftune-core", _alone), threading.Barrier(threads)
    wait([pool.submit(begun.wait) for _ in range(threads)])
    torch.set_num_threads(threads)
    return pool


def _alone() -> None:
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1
