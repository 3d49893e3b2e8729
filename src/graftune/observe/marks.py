"""Named ranges in a profile, for the points of a run where the host waits: the capture, evaluations, answers,
checkpoints. Everything between two of them is steps that follow each other without a wait."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def marked(name: str) -> AbstractContextManager[Any]:
    """`with marked("evaluate"):` is the range "graftune: evaluate" while a profiler runs, and nothing otherwise."""
    if not torch.autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(f"graftune: {name}")
