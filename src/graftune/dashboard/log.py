"""All of a run's metrics.jsonl: the numbers of steps as one array per name, other events as they are.

100,000 steps take a few megabytes, and numpy cuts a view out of them. Events after the step of a resume are dropped, as
observe/events.py `latest` does. A line that is not an event is counted and skipped. Of the other events only the latest
are kept.
"""

from __future__ import annotations

import json
import math
import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from operator import lt
from pathlib import Path
from typing import Any

import numpy as np

from graftune.dashboard.line_reader import LineReader
from graftune.io.json_file import no_collections
from graftune.observe.downsample import downsampled, numbers
from graftune.observe.events import MOST_CURVES, NOT_CURVES, Event, number, parsed, plain, step_of

# The events that the views show.
KINDS = (
    "run_start", "resume", "extend", "eval", "sample", "answers", "warning", "memory", "routing", "profile", "run_end",
)  # fmt: skip
MOST_EVENTS = 5000  # of each kind
MOST_POINTS = 20_000  # of a curve that is asked for


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
    """The values as floats, NaN where there is no number; None for text."""
    try:
        return array("d", values)
    except (TypeError, OverflowError):
        found = [float(v) if isinstance(v, bool) else number(v) for v in values]
    if all(value is None for value in found) and any(value is not None for value in values):
        return None
    return array("d", [math.nan if value is None else value for value in found])


class Log(LineReader):
    def __init__(self, path: str | Path):
        super().__init__(path)
        self.lock = threading.Lock()  # of this log alone: the list of runs does not wait while a long log is read

    def clear(self) -> None:
        self.steps = array("q")
        self.values: dict[str, array[float]] = {}
        self._events: dict[str, deque[Event]] = {kind: deque(maxlen=MOST_EVENTS) for kind in KINDS}

    def of(self, kind: str) -> list[Event]:
        return list(self._events[kind])

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

    def _add_steps(self, events: list[Event]) -> None:
        """Column by column, which is ten times as fast as step by step. A step that does not follow the last one (in a
        file that was edited by hand) replaces the steps from there on."""
        steps = [step for event in events if (step := step_of(event)) is not None]
        names = dict.fromkeys(chain.from_iterable(events))
        last = self.steps[-1] if self.steps else -1
        if len(events) > 1 and (
            len(steps) < len(events) or len(names) > 4 * MOST_CURVES or not all(map(lt, [last, *steps], steps))
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
                if name in ("event", "step") or column is None or len(self.values) >= MOST_CURVES:
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
                left = [event for event in self._events[name] if (step_of(event) or 0) <= step]
                self._events[name] = deque(left, MOST_EVENTS)
            self._events["run_end"].clear()
        self._events[kind].append(plain(event))

    def _drop_steps_after(self, step: int) -> None:
        end = bisect_right(self.steps, step)
        del self.steps[end:]
        for column in self.values.values():
            del column[end:]


def series(log: Log, names: Sequence[str], points: int, first: int | None, last: int | None) -> dict[str, Any]:
    """The curves of a run, or of a part of it: the named numbers of the steps from `first` to `last`, at `points` or
    fewer places; without names all curves."""
    steps = np.frombuffer(log.steps, np.int64) if len(log.steps) else np.empty(0, np.int64)
    start = 0 if first is None else int(np.searchsorted(steps, first, "left"))
    end = len(steps) if last is None else int(np.searchsorted(steps, last, "right"))
    chosen = [name for name in names if name in log.values]
    chosen = chosen if names else [name for name in log.values if name not in NOT_CURVES]
    columns = {name: np.frombuffer(log.values[name], np.float64)[start:end] for name in chosen} if len(steps) else {}
    shown, values = downsampled(steps[start:end], columns, max(4, min(points, MOST_POINTS)))
    return {
        "names": chosen,
        "available": list(log.values),
        "steps": shown.tolist(),
        "values": {name: numbers(column) for name, column in values.items()},
        "last": log.steps[-1] if len(log.steps) else 0,
        "count": max(0, end - start),
        "offset": log.offset,
    }
