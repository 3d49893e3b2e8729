"""Computes the reference model's log-probabilities of a run's data before its first step (session/references.py)."""

from __future__ import annotations

from graftune.data.dataset import Dataset
from graftune.data.encoded import reference_model_of
from graftune.session import references
from graftune.training.hooks import Hook, RunState


class References(Hook):
    """A resumed run finds them again. Nothing is done where a step computes them, or the loss has no reference."""

    def __init__(self, *parts: Dataset):
        self.parts = [part.examples for part in parts if len(part) and reference_model_of(part.examples)]

    def start(self, state: RunState) -> None:
        for examples in self.parts:
            counted = state.report.counted("reference", len(examples), "examples", state.check_stop_alone)
            with state.pausing_steps("reference"), counted as count, state.stop.interruptible():
                line = references.fill(state.parts, examples, count)
            state.report.console.note(line)
