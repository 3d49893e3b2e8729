"""metrics.jsonl followed from another process: only what was appended since the last look is read.

Two readers share the following. `Glance` is what a list of a thousand runs needs: it looks for the few lines that are
no steps and decodes the last step only. `Log` is one run in full: every figure of every step in a flat array, so that
100,000 steps are a few megabytes and a view of them is cut out by numpy. Both drop what a resume took back, as
observe/events.py `latest` does. A line that is no event is counted and passed over; what stands after the last newline
is still being written and waits.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import lt
from pathlib import Path
from typing import Any

from graftune.dashboard.reading import opened
from graftune.observe.events import Event, parsed

CHUNK = 1 << 18  # bytes read at once: decoding them lets no other thread run for some milliseconds
LONGEST = 16 << 20  # bytes of a line; what is longer is no event of ours
MOST = 5000  # events kept of each kind that is not a step
STEP = b'{"event": "step", '  # how EventLog begins a step


def step_of(event: Event) -> int | None:
    step = event.get("step")
    return step if type(step) is int and 0 <= step < 1 << 53 else None


def number(value: Any) -> float | None:
    """A finite number of an event; None for whatever else stands there."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:
            return None
        return found if math.isfinite(found) else None
    return None


class Follower:
    """A file that grows. `advance` reads the whole lines that are new since the last call."""

    def __init__(self, path: str | Path):
        self.path, self.offset, self.bad = path, 0, 0
        self._file = 0  # number of the file that was read: another one has taken its place if it changes

    def advance(self) -> None:
        try:
            with opened(self.path) as handle:
                found = os.fstat(handle)
                if found.st_ino != self._file or found.st_size < self.offset:
                    self._file = found.st_ino
                    self.reset()
                if found.st_size > self.offset:
                    for piece in self._pieces(handle, found.st_size):
                        self.take(piece)
        except FileNotFoundError:
            if self._file:
                self._file = 0
                self.reset()
        except OSError:
            return  # a link, a folder, no permission: a run without events

    def _pieces(self, handle: int, size: int) -> Iterator[bytes]:
        """Whole lines, a chunk at a time."""
        held = b""
        place = self.offset
        while place < size and (content := os.pread(handle, min(CHUNK, size - place), place)):
            place += len(content)
            held += content
            end = held.rfind(b"\n") + 1
            if end:
                piece, held = held[:end], held[end:]
                self.offset = place - len(held)
                yield piece
            elif len(held) > LONGEST:
                self.bad, self.offset, held = self.bad + 1, place, b""

    def reset(self) -> None:
        """Forget what was read: the file begins anew."""
        self.offset, self.bad = 0, 0

    def take(self, piece: bytes) -> None:
        raise NotImplementedError


class Glance(Follower):
    """What a list shows of a run: its beginning, its last step, its evaluations, its phase and its end."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.start: Event = {}
        self.total: int | None = None
        self.step: Event = {}
        self.evals: dict[int, float] = {}
        self.phase = ""
        self.end: Event = {}
        self.resumed: int | None = None  # the step of the last resume, until a step follows it
        self.updated: float | None = None
        self.events = 0  # seen, of those that are looked at

    def take(self, piece: bytes) -> None:
        pending = b""  # the latest step: only the last one before another event is decoded
        for line in piece[:-1].split(b"\n"):
            if line.startswith(STEP):
                pending = line
                continue
            if pending:
                self._see_line(pending)
                pending = b""
            self._see_line(line)
        if pending:
            self._see_line(pending)

    def _see_line(self, line: bytes) -> None:
        event = parsed(line)
        if event is not None:
            self._see(event)

    def _see(self, event: Event) -> None:
        kind, step = event["event"], step_of(event)
        self.events += 1
        if (time := number(event.get("time"))) is not None:
            self.updated = time
        if kind == "run_start":
            total, updated = event.get("steps"), self.updated
            offset, bad, events = self.offset, self.bad, self.events
            self.reset()
            self.offset, self.bad, self.events, self.updated = offset, bad, events, updated
            self.start, self.total = event, total if type(total) is int else None
        elif kind == "step" and step is not None:
            self.step, self.end, self.resumed = event, {}, None
        elif kind == "eval" and step is not None and (loss := number(event.get("loss"))) is not None:
            self.evals[step] = loss
        elif kind == "resume" and step is not None:
            self.evals = {at: loss for at, loss in self.evals.items() if at <= step}
            self.end, self.phase, self.resumed = {}, "", step
        elif kind == "extend" and type(event.get("steps")) is int:
            self.total = event["steps"]
        elif kind == "phase":
            self.phase = str(event.get("phase"))
        elif kind == "run_end":
            self.end = event

    @property
    def steps(self) -> int:
        """Steps that are done."""
        if self.end and (ended := step_of(self.end)) is not None:
            return ended
        return self.resumed if self.resumed is not None else step_of(self.step) or 0

    def best(self) -> tuple[float | None, int | None]:
        """The least validation loss after the first step, and its step."""
        found = [(loss, step) for step, loss in self.evals.items() if step > 0]
        return min(found) if found else (None, None)


def _columns(events: list[Event]) -> Iterable[tuple[str, Sequence[Any]]]:
    """What each name stands for in all of them, None where an event does not have it."""
    if len(set(map(tuple, events))) == 1:  # the same names in the same order, as one run writes them
        return zip(events[0], zip(*map(dict.values, events), strict=True), strict=True)
    names = dict.fromkeys(chain.from_iterable(events))
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


class Log(Follower):
    """All of a run: figures of steps as arrays, other events as they are."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.steps = array("q")
        self.values: dict[str, array[float]] = {}
        self.kept: dict[str, list[Event]] = {}

    @property
    def nbytes(self) -> int:
        return 8 * len(self.steps) * (1 + len(self.values))

    def of(self, kind: str) -> list[Event]:
        return self.kept.get(kind, [])

    def take(self, piece: bytes) -> None:
        try:  # one call for all of them is twice as fast
            events = json.loads(b"[" + piece[:-1].replace(b"\n", b",") + b"]")
        except (ValueError, RecursionError):
            events = []
        if len(events) != piece.count(b"\n"):  # or two values on a line, which only look like a list when joined
            events = [parsed(line) for line in piece[:-1].split(b"\n")]
        steps: list[Event] = []  # that follow each other
        for event in events:
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                self.bad += 1
            elif event["event"] == "step":
                steps.append(event)
            else:
                self._take_steps(steps)
                steps = []
                self._other(event)
        self._take_steps(steps)

    def _take_steps(self, events: list[Event]) -> None:
        """By column, which is ten times as fast, if they follow what is there as a run writes them."""
        numbers = [step for event in events if (step := step_of(event)) is not None]
        last = self.steps[-1] if self.steps else -1
        if len(numbers) < len(events) or not all(map(lt, [last, *numbers], numbers)):
            for event in events:
                self._step(event)
            return
        before = len(self.steps)
        self.steps.extend(numbers)
        for name, figures in _columns(events):
            if name in ("event", "step"):
                continue
            column = _column(figures)
            if name not in self.values:
                if column is None or len(self.values) >= 64:
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
                if (figure is None and value is not None) or len(values) >= 64:
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
        kept = self.kept.setdefault(kind if len(self.kept) < 64 else "more", [])
        kept.append(event)
        if len(kept) > MOST:
            del kept[: len(kept) - MOST]

    def _take_back(self, step: int) -> None:
        """A resume at `step`: what came after it never happened."""
        end = bisect_right(self.steps, step)
        del self.steps[end:]
        for column in self.values.values():
            del column[end:]
        for kind in ("eval", "sample", "warning", "memory", "profile"):
            self.kept[kind] = [e for e in self.of(kind) if (at := step_of(e)) is None or at <= step]
        self.kept.pop("run_end", None)
