"""Experiment trackers and the callbacks of `graftune.train`: both get every event of the log."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from graftune.observe.events import Event
from graftune.observe.trackers import Tracking
from graftune.training.hooks import Hook, RunState

Callback = Callable[[Event], object]


class Callbacks(Hook):
    """Functions of the user. One that returns "stop" ends the run after a checkpoint, as Ctrl-C does."""

    def __init__(self, callbacks: Sequence[Callback]):
        self.callbacks = callbacks

    def event(self, state: RunState, event: Event) -> None:
        answers = [callback(event) for callback in self.callbacks]
        if "stop" in answers:
            state.stop.signal = state.stop.signal or signal.SIGINT


class Trackers(Hook):
    """Sends the figures of the run to the tracker of the setting `track`."""

    def __init__(self, tracking: Tracking):
        self.tracking = tracking

    def event(self, state: RunState, event: Event) -> None:
        self.tracking(event)

    def close(self, state: RunState) -> None:
        self.tracking.close()
