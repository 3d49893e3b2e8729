"""One rank of a run on CUDA, in a process of its own; see test_dist.py. Not a test.

    python -m tests.gpu.ranked SETTINGS.json [unwatched] [hang]

`unwatched`: from the second step on nothing may synchronise. `hang`: the captured update waits on a flag in the
device's memory, which the fifth step clears, so that it never ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch


def unwatched(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """From the second step on, neither sending a step nor asking for what is done may synchronise."""
    from graftune.step.pipeline import DevicePipeline

    def without_waits(work: Any, *args: Any, **named: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return work(*args, **named)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    send, asked = DevicePipeline.step, DevicePipeline.finished

    def step(self: Any, *args: Any, **named: Any) -> Any:
        return without_waits(send, self, *args, **named) if self.count else send(self, *args, **named)

    def finished(self: Any, wait: bool = False) -> Any:
        return asked(self, wait) if wait else without_waits(asked, self, wait)

    put(DevicePipeline, "step", step)
    put(DevicePipeline, "finished", finished)


def hang() -> None:
    import triton
    import triton.language as tl

    from graftune.step.pipeline import DevicePipeline
    from graftune.step.step import Step

    @triton.jit
    def until_set(flag):
        value = tl.atomic_add(flag, 0)
        while value == 0:
            value = tl.atomic_add(flag, 0)

    flag = torch.ones(1, dtype=torch.int32, device="cuda")
    update, send = Step.update_step, DevicePipeline.step

    def update_step(self: Any) -> Any:
        if not self.arena.grads.is_meta:
            until_set[(1,)](flag)
        return update(self)

    def step(self: Any, *args: Any, **named: Any) -> Any:
        if self.count == 4:
            flag.zero_()
        return send(self, *args, **named)

    Step.update_step, DevicePipeline.step = update_step, step  # type: ignore[method-assign]


def main(path: str, *how: str) -> None:
    from graftune.api import train
    from graftune.settings.config import Config

    for name in how:
        {"unwatched": unwatched, "hang": hang}[name]()
    with open(path) as file:
        train(Config.of(json.load(file)))


if __name__ == "__main__":
    main(*sys.argv[1:])
