"""What a list of a thousand runs shows of each, found in its log without decoding most of it.

Only lines of the few kinds that matter are decoded, and of steps that follow each other the last one only. What a
resume took back is dropped, as observe/events.py `latest` does it.
"""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from pathlib import Path

from graftune.dashboard.lines import Follower, events_of
from graftune.dashboard.log import step_of, whole
from graftune.observe.events import Event, number

STEP = b'{"event": "step", '  # how EventLog begins a step
KINDS = re.compile(
    rb'"event"\s*:\s*"'
    rb'(?:run_start|step|eval|resume|extend|phase|sample|memory|warning|profile|checkpoint|run_end)"'
)
FIELDS = ("event", "time", "step", "loss", "tok_s", "examples", "encoded", "stopped", "signal")  # that are asked for
MOST_EVALS = 5000  # losses that are kept, the least of them


class Glance(Follower):
    """A run's beginning, last step, evaluations, phase and end."""

    SECONDS = 0.5  # the list of all runs waits for it

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.start: Event = {}
        self.total: int | None = None
        self.step: Event = {}
        self.evals: dict[int, float] = {}
        self._evaluated: list[int] = []  # their steps, in order
        self.phase = ""
        self.end: Event = {}
        self.resumed: int | None = None  # the step of the last resume, until a step follows it
        self.updated: float | None = None
        self.began: tuple[float | None, int] = None, 0  # time and step of the last run_start or resume
        self._worked = 0.0  # seconds, before that
        self.events = 0  # seen, of those that are looked at

    def take(self, piece: bytes) -> None:
        wanted: list[bytes] = []
        pending = b""  # the latest step: only the last one before another event is decoded
        for line in piece[:-1].split(b"\n"):
            if line.startswith(STEP):
                pending = line
            elif KINDS.search(line):
                wanted += [pending, line] if pending else [line]
                pending = b""
        if pending:
            wanted.append(pending)
        if wanted:
            for event in events_of(b"\n".join(wanted) + b"\n"):
                if event is not None:
                    self._see(event)

    def _see(self, event: Event) -> None:
        kind, step = event["event"], step_of(event)
        self.events += 1
        worked = self.worked_s or 0.0
        if (time := number(event.get("time"))) is not None:
            self.updated = time
        if kind == "run_start":
            updated = self.updated
            offset, bad, events = self.offset, self.bad, self.events
            self.reset()
            self.offset, self.bad, self.events, self.updated = offset, bad, events, updated
            self.start, self.total = _short(event), whole(event.get("steps"))
            self.began = time, 0
        elif kind == "step" and step is not None:
            self.step, self.end, self.resumed = _short(event), {}, None
        elif kind == "eval" and step is not None and (loss := number(event.get("loss"))) is not None:
            if step not in self.evals:
                insort(self._evaluated, step)
            self.evals[step] = loss
            if len(self.evals) > 2 * MOST_EVALS:
                self.evals = dict(sorted(self.evals.items(), key=lambda each: each[1])[:MOST_EVALS])
                self._evaluated = sorted(self.evals)
        elif kind == "resume" and step is not None:
            end = bisect_right(self._evaluated, step)
            for at in self._evaluated[end:]:
                del self.evals[at]
            del self._evaluated[end:]
            self.end, self.phase, self.resumed = {}, "", step
            self._worked, self.began = worked, (time, step)
        elif kind == "extend" and (total := whole(event.get("steps"))) is not None:
            self.total = total
        elif kind == "phase":
            self.phase = str(event.get("phase"))[:40]
        elif kind == "run_end":
            self.end = _short(event)

    @property
    def steps(self) -> int:
        """Steps that are done."""
        if self.end and (ended := step_of(self.end)) is not None:
            return ended
        return self.resumed if self.resumed is not None else step_of(self.step) or 0

    @property
    def worked_s(self) -> float | None:
        """Seconds from each beginning to the last event before the next one, as observe/events.py `worked_seconds`."""
        if self.began[0] is None or self.updated is None:
            return None
        return self._worked + max(0.0, self.updated - self.began[0])

    def best(self) -> tuple[float | None, int | None]:
        """The least validation loss after the first step, and its step."""
        found = [(loss, step) for step, loss in self.evals.items() if step > 0]
        return min(found) if found else (None, None)


def _short(event: Event) -> Event:
    """The fields that are asked for, if they are what they should be: a list of runs holds all of these in memory."""
    return {name: _scalar(event[name]) for name in FIELDS if name in event}


def _scalar(value: object) -> str | float | None:
    if isinstance(value, str):
        return value[:200]
    return number(value) if whole(value) is None else whole(value)
