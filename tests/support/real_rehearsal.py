"""A rehearsal on real tensors, on a CPU: the reference for the plan, which rehearses on tensors without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graftune.kernels.rehearsal import Device, rehearsing
from graftune.plan import Bytes, Setup
from graftune.plan.counting import Tally, bare
from graftune.plan.rehearse import CountingRehearsal, run_phases


def rehearse_real(setup: Setup) -> Bytes:
    tally = Tally()
    follow = Follow(tally)
    with rehearsing(CountingRehearsal(Device(setup.runtime.device.type), tally, follow)), follow:
        return run_phases(setup, tally)


@bare
class Follow(TorchDispatchMode):
    """Enters what operations on real tensors make: the reference for the estimate on tensors without memory."""

    def __init__(self, tally: Tally):
        super().__init__()
        self.tally = tally
        self.off = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self.off = self.off, True
        try:
            yield
        finally:
            self.off = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self.off:
            return made
        for tensor in made if isinstance(made, (list, tuple)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.tally.see(tensor, tensor.device.type)
        return made
