"""All of a run's metrics.jsonl: the numbers of steps as one array per name, other events as they are.

100,000 steps take a few megabytes, and numpy cuts a view out of them. Events after the step of a resume are dropped, as
observe/events.py `latest` does. A line that is not an event is counted and skipped. Memory is bounded: a log of
millions of steps is downsampled as it grows, and only the latest of the other events are kept.
"""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from operator import lt
from typing import Any

from graftune.dashboard.line_reader import LineReader
from graftune.io.json_file import no_collections
from graftune.observe.events import MOST_CURVES, Event, number, parsed, plain, step_of

# The events that the views show.
KINDS = (
    "run_start", "resume", "extend", "eval", "sample", "answers", "warning", "memory", "routing", "profile", "run_end",
)  # fmt: skip
MOST_EVENTS, MOST_BYTES = 5000, 2 << 20  # events of each kind, and their size as JSON
MOST_NAMES, MOST_NUMBERS = MOST_CURVES, 2 << 20  # of a step, and of all steps


def _events(piece: bytes) -> Sequence[Event | None]:
    """The event on each line, None where there is none. Lines without nested values, as those of steps, are decoded in
    one call, which takes half the time."""
    lines = piece[:-1].split(b"\n")
    if piece.count(b"{") == len(lines) and b"[" not in piece:
        with suppress(ValueError), no_collections():
            found = json.loads(b"[" + b",".join(lines) + b"]")
            if len(found) == len(lines) and all(isinstance(e, dict) and isinstance(e.get("event"), str) for e in found):
                return found
    return [parsed(line) for line in lines]


def _column(values: Sequence[Any]) -> array[float] | None:
    """As floats, NaN where there is no number; None for text."""
    try:
        return array("d", values)
    except (TypeError, OverflowError):
        found = [float(v) if isinstance(v, bool) else number(v) for v in values]
    if all(value is None for value in found) and any(value is not None for value in values):
        return None
    return array("d", [math.nan if value is None else value for value in found])


class LatestEvents:
    def __init__(self) -> None:
        self._events: deque[tuple[int, Event]] = deque()  # with their sizes
        self.size = 0

    def append(self, event: Event) -> None:
        safe = plain(event)
        self._events.append((len(json.dumps(safe)), safe))
        self.size += self._events[-1][0]
        while len(self._events) > MOST_EVENTS or (self.size > MOST_BYTES and len(self._events) > 1):
            self.size -= self._events.popleft()[0]

    def drop_after(self, step: int) -> None:
        self._events = deque((size, event) for size, event in self._events if (step_of(event) or 0) <= step)
        self.size = sum(size for size, _ in self._events)

    def all(self) -> list[Event]:
        return [event for _, event in self._events]


class Log(LineReader):
    def clear(self) -> None:
        self.steps = array("q")
        self.values: dict[str, array[float]] = {}
        self._events = {kind: LatestEvents() for kind in KINDS}

    @property
    def nbytes(self) -> int:
        return 8 * len(self.steps) * (1 + len(self.values)) + sum(events.size for events in self._events.values())

    def of(self, kind: str) -> list[Event]:
        return self._events[kind].all()

    def take(self, piece: bytes) -> None:
        steps: list[Event] = []  # without another event between them
        for event in _events(piece):
            if event is None:
                self.bad += 1
            elif event["event"] == "step":
                steps.append(event)
            elif event["event"] in KINDS:
                self._add_steps(steps)
                steps = []
                self._add_event(event)
        self._add_steps(steps)
        if len(self.steps) * len(self.values) > MOST_NUMBERS:
            self._downsample()

    def _downsample(self) -> None:
        """To half as many steps, with their extremes."""
        import numpy as np  # here: the list of runs works without it

        from graftune.observe.downsample import downsampled

        columns = {name: np.frombuffer(values, np.float64) for name, values in self.values.items()}
        steps, values = downsampled(np.frombuffer(self.steps, np.int64), columns, len(self.steps) // 2)
        self.steps = array("q", steps.tobytes())
        self.values = {name: array("d", column.tobytes()) for name, column in values.items()}

    def _add_steps(self, events: list[Event]) -> None:
        """Column by column, which is ten times as fast as step by step. A step that does not follow the last one (in a
        file that was edited by hand) replaces the steps from there on."""
        steps = [step for event in events if (step := step_of(event)) is not None]
        names = dict.fromkeys(chain.from_iterable(events))
        last = self.steps[-1] if self.steps else -1
        if len(events) > 1 and (
            len(steps) < len(events) or len(names) > 4 * MOST_NAMES or not all(map(lt, [last, *steps], steps))
        ):
            for event in events:
                self._add_steps([event])
            return
        if not steps:
            self.bad += len(events)
            return
        if steps[0] <= last:
            self._drop_steps_after(steps[0] - 1)
        before = len(self.steps)
        self.steps.extend(steps)
        for name in names:
            column = _column([event.get(name) for event in events])
            if name not in self.values:
                if name in ("event", "step") or column is None or len(self.values) >= MOST_NAMES:
                    continue
                self.values[name] = array("d", [math.nan]) * before
            self.values[name].extend(column or array("d", [math.nan]) * len(events))
        for values in self.values.values():
            values.extend(array("d", [math.nan]) * (len(self.steps) - len(values)))

    def _add_event(self, event: Event) -> None:
        kind, step = event["event"], step_of(event)
        if kind == "run_start":
            self.clear()
        elif kind == "resume" and step is not None:
            self._drop_steps_after(step)
            for name in KINDS[1:-1]:
                self._events[name].drop_after(step)
            self._events["run_end"] = LatestEvents()
        self._events[kind].append(event)

    def _drop_steps_after(self, step: int) -> None:
        end = bisect_right(self.steps, step)
        del self.steps[end:]
        for column in self.values.values():
            del column[end:]
