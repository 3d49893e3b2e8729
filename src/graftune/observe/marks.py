"""A trace of a run's steps, by torch's profiler, and named ranges in it for the points where the host waits: the
capture, evaluations, answers, checkpoints, and the device when it is two steps behind. Everything else is steps that
follow each other. Who owns the time of a step is another question: observe/profile.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from graftune.private import find

_profiling = find("torch.autograd._profiler_enabled")
BEFORE = 3  # steps that are not traced: kernels compile, the graph is captured, clocks settle


def marked(name: str) -> AbstractContextManager[Any]:
    """`with marked("evaluate"):` is the range "graftune: evaluate" while a profiler runs, and nothing otherwise."""
    if not _profiling():
        return nullcontext()
    return torch.profiler.record_function(f"graftune: {name}")


class StepTrace:
    """Of so many steps, for ui.perfetto.dev; of none, nothing. A run that ends earlier has those there were."""

    def __init__(self, steps: int, path: Path, device: torch.device, said: Callable[[str], None]):
        self.path, self.said, self.sent = path, said, 0
        self.profiler: Any = None
        if steps:
            kinds = torch.profiler.ProfilerActivity
            self.profiler = torch.profiler.profile(
                activities=[kinds.CPU, *([kinds.CUDA] if device.type == "cuda" else [])],
                schedule=torch.profiler.schedule(wait=BEFORE, warmup=1, active=steps, repeat=1),
                on_trace_ready=self._write,
            )

    def __enter__(self) -> StepTrace:
        if self.profiler is not None:
            self.profiler.start()
        return self

    def step(self) -> None:
        """A step was sent."""
        self.sent += 1
        if self.profiler is not None:
            self.profiler.step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            if self.sent <= BEFORE + 1:
                self.said(f"no trace: the run had no more than {BEFORE + 1} steps")

    def _write(self, profiler: Any) -> None:
        if self.sent > BEFORE + 1:
            try:
                profiler.export_chrome_trace(str(self.path))
            except OSError as error:  # a full disk: the run does not hang on its trace
                self.said(f"no trace: {error}")
                return
            self.said(f"trace: {self.path} (open it in ui.perfetto.dev)")
