"""One run's metrics.jsonl in full: every figure of every step in a flat array, so that 100,000 steps are a few
megabytes and a view of them is cut out by numpy; other events as they are.

What a resume took back is dropped, as observe/events.py `latest` does. A line that is no event is counted and passed
over. All of it is bounded: a log of millions of steps is thinned out as it grows, and other events are kept up to a
size, the oldest going first.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import lt
from pathlib import Path
from typing import Any

from graftune.dashboard.bounded import Cut
from graftune.dashboard.lines import Follower, events_of
from graftune.observe.events import Event, number

KINDS = ("run_start", "resume", "eval", "sample", "warning", "memory", "profile", "run_end")  # that views show
MOST_EVENTS, MOST_BYTES = 5000, 2 << 20  # events kept of each kind, and about how much they take
MOST_NAMES, MOST_FIGURES = 64, 2 << 20  # of a step, and of all steps
MOST_DISPLACED = 2000  # steps that stand behind a later one: putting each in its place moves all that follow


def whole(value: Any) -> int | None:
    """A whole number as JavaScript has them, not negative; None for whatever else stands there."""
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def step_of(event: Event) -> int | None:
    return whole(event.get("step"))


def _columns(events: list[Event], names: Iterable[str]) -> Iterable[tuple[str, Sequence[Any]]]:
    """What each of their names stands for in all of them, None where an event does not have it."""
    if len(set(map(tuple, events))) == 1:  # the same names in the same order, as one run writes them
        return zip(events[0], zip(*map(dict.values, events), strict=True), strict=True)
    return ((name, [event.get(name) for event in events]) for name in names)


def _column(values: Sequence[Any]) -> array[float] | None:
    """As numbers, NaN where there is none; None for text."""
    try:
        return array("d", values)
    except (TypeError, OverflowError):
        figures = [float(v) if isinstance(v, bool) else number(v) for v in values]
    if all(figure is None for figure in figures) and any(value is not None for value in values):
        return None
    return array("d", [math.nan if figure is None else figure for figure in figures])


def _is_small(value: Any) -> bool:
    """A number, or a word."""
    return value is None or number(value) is not None or (isinstance(value, str) and len(value) < 40)


class Kept:
    """Events of one kind, the latest ones, each cut to size."""

    def __init__(self) -> None:
        self._events: OrderedDict[int, tuple[int, Event]] = OrderedDict()  # by the order they came in; with their sizes
        self._steps: list[tuple[int, int]] = []  # of those that have one, each with its place in that order, sorted
        self._count = 0
        self.size = 0

    def append(self, event: Event) -> None:
        kept, size = event, 16 * len(event)
        if not (len(event) <= MOST_NAMES and all(map(_is_small, event.values()))):
            cut = Cut(event)
            kept, size = cut.document, cut.size
        self._count += 1
        self._events[self._count] = size, kept
        self.size += size
        if (step := step_of(kept)) is not None:
            insort(self._steps, (step, self._count))
        while len(self._events) > MOST_EVENTS or (self.size > MOST_BYTES and len(self._events) > 1):
            place, (size, oldest) = self._events.popitem(last=False)
            self.size -= size
            if (step := step_of(oldest)) is not None:
                del self._steps[bisect_left(self._steps, (step, place))]

    def take_back(self, step: int) -> None:
        end = bisect_left(self._steps, (step + 1, 0))
        for _, place in self._steps[end:]:
            self.size -= self._events.pop(place)[0]
        del self._steps[end:]

    def all(self) -> list[Event]:
        return [event for _, event in self._events.values()]


class Log(Follower):
    """All of a run: figures of steps as arrays, other events as they are."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.steps = array("q")
        self.values: dict[str, array[float]] = {}
        self._kept = {kind: Kept() for kind in KINDS}
        self._displaced = 0  # steps that did not follow those before them

    @property
    def nbytes(self) -> int:
        return 8 * len(self.steps) * (1 + len(self.values)) + sum(kept.size for kept in self._kept.values())

    def of(self, kind: str) -> list[Event]:
        return self._kept[kind].all()

    def take(self, piece: bytes) -> None:
        steps: list[Event] = []  # that follow each other
        for event in events_of(piece):
            if event is None:
                self.bad += 1
            elif event["event"] == "step":
                steps.append(event)
            elif event["event"] in KINDS:
                self._take_steps(steps)
                steps = []
                self._other(event)
        self._take_steps(steps)
        if len(self.steps) * len(self.values) > MOST_FIGURES:
            self._thin()

    def _thin(self) -> None:
        """Half as many: the least and the greatest of each four steps, at the first and the third."""
        import numpy as np  # here: a list of runs does without it

        end = len(self.steps) // 4 * 4
        numbers = np.frombuffer(self.steps, np.int64)[:end].reshape(-1, 4)
        thin = array("q", numbers[:, ::2].tobytes()) + self.steps[end:]
        for name, values in self.values.items():
            fours = np.frombuffer(values, np.float64)[:end].reshape(-1, 4)
            finite = np.isfinite(fours)
            low, high = np.where(finite, fours, np.inf), np.where(finite, fours, -np.inf)
            pairs = np.stack([low.min(1), high.max(1)], 1)
            falls = low.argmin(1) > high.argmax(1)
            pairs[falls] = pairs[falls, ::-1]
            pairs[np.isinf(pairs)] = np.nan
            self.values[name] = array("d", pairs.tobytes()) + values[end:]
        self.steps = thin

    def _take_steps(self, events: list[Event]) -> None:
        """By column, which is ten times as fast, if they follow what is there as a run writes them."""
        if not events:
            return
        numbers = [step for event in events if (step := step_of(event)) is not None]
        last = self.steps[-1] if self.steps else -1
        names = dict.fromkeys(chain.from_iterable(events))
        if len(numbers) < len(events) or len(names) > 4 * MOST_NAMES or not all(map(lt, [last, *numbers], numbers)):
            for event in events:
                self._step(event)
            return
        before = len(self.steps)
        self.steps.extend(numbers)
        for name, figures in _columns(events, names):
            if name in ("event", "step"):
                continue
            column = _column(figures)
            if name not in self.values:
                if column is None or len(self.values) >= MOST_NAMES:
                    continue  # text, or more names than a run of ours has
                self.values[name] = array("d", [math.nan]) * before
            self.values[name].extend(column or array("d", [math.nan]) * len(events))
        for values in self.values.values():
            values.extend(array("d", [math.nan]) * (len(self.steps) - len(values)))

    def _step(self, event: Event) -> None:
        step = step_of(event)
        if step is None:
            self.bad += 1
            return
        steps, values = self.steps, self.values
        place = len(steps)
        if steps and step <= steps[-1]:  # a file that was put together by hand: the last of each step counts
            self._displaced += 1
            if self._displaced > MOST_DISPLACED:
                self.bad += 1
                return
            place = bisect_left(steps, step)
            if steps[place] == step:
                del steps[place]
                for column in values.values():
                    del column[place]
        steps.insert(place, step)
        for name, value in event.items():
            if name in ("event", "step"):
                continue
            figure = float(value) if isinstance(value, bool) else number(value)
            if name not in values:
                if (figure is None and value is not None) or len(values) >= MOST_NAMES:
                    continue  # text, or more names than a run of ours has
                values[name] = array("d", [math.nan]) * (len(steps) - 1)
            values[name].insert(place, math.nan if figure is None else figure)
        for column in values.values():
            if len(column) < len(steps):
                column.insert(place, math.nan)

    def _other(self, event: Event) -> None:
        kind, step = event["event"], step_of(event)
        if kind == "run_start":
            offset, bad = self.offset, self.bad
            self.reset()
            self.offset, self.bad = offset, bad
        elif kind == "resume" and step is not None:
            self._take_back(step)
        self._kept[kind].append(event)

    def _take_back(self, step: int) -> None:
        """A resume at `step`: what came after it never happened."""
        end = bisect_right(self.steps, step)
        del self.steps[end:]
        for column in self.values.values():
            del column[end:]
        for kind in ("eval", "sample", "warning", "memory", "profile"):
            self._kept[kind].take_back(step)
        self._kept["run_end"] = Kept()
