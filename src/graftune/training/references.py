"""Computes the reference model's log-probabilities of a run's data before its first step (session/references.py)."""

from __future__ import annotations

from graftune.data.encoded import Examples, unit_of
from graftune.session import references
from graftune.training.hooks import Hook, RunState


class References(Hook):
    """Fills in the references before the first step. A resumed run reads them from the cache."""

    def __init__(self, *parts: Examples):
        self.parts = [part for part in parts if len(part)]

    def start(self, state: RunState) -> None:
        for examples in self.parts:
            with state.counting("reference", "reference", len(examples), unit_of(examples)) as count:
                line = references.fill(state.parts, examples, count)
            state.report.console.note(line)
