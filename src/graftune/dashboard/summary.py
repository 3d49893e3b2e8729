"""The few facts of a run that the list of runs shows, read from its log without decoding most of it.

Of consecutive steps only the last is decoded, so a thousand logs are read in a second. Events after the step of a
resume are dropped, as observe/events.py `latest` does.
"""

from __future__ import annotations

from operator import itemgetter

from graftune.dashboard.line_reader import LineReader
from graftune.observe.events import Event, number, parsed, step_of, whole

STEP = b'{"event": "step", '  # how EventLog begins a step
FIELDS = ("event", "time", "step", "loss", "tok_s", "examples", "encoded", "stopped", "signal")  # that are shown
MOST_EVALS = 5000  # evaluations that are kept, those with the lowest loss


class RunSummary(LineReader):
    """A run's beginning, last step, evaluations, phase and end."""

    SECONDS = 0.5  # the list of all runs waits for it

    def clear(self) -> None:
        self.start: Event = {}
        self.total: int | None = None
        self.step: Event = {}
        self.evals: dict[int, float] = {}
        self.phase = ""
        self.end: Event = {}
        self.resumed: int | None = None  # the step of the last resume, until a step follows it
        self.updated: float | None = None
        self.began: tuple[float | None, int] = None, 0  # time and step of the last run_start or resume
        self._worked = 0.0  # seconds before that
        self.has_events = False

    def take(self, piece: bytes) -> None:
        wanted: list[bytes] = []
        pending = b""  # the latest step, decoded only if it is the last one before another event
        for line in piece[:-1].split(b"\n"):
            if line.startswith(STEP):
                pending = line
            else:
                wanted += [pending, line]
                pending = b""
        for line in [*wanted, pending]:
            if (event := parsed(line)) is not None:
                self._add(event)

    def _add(self, event: Event) -> None:
        kind, step, time = event["event"], step_of(event), number(event.get("time"))
        worked = self.worked_s or 0.0
        if kind == "run_start":
            updated = self.updated
            self.clear()
            self.start, self.total, self.updated = _shown(event), whole(event.get("steps")), updated
            self.began = time, 0
        elif kind == "step" and step is not None:
            self.step, self.end, self.resumed = _shown(event), {}, None
        elif kind == "eval" and step is not None and (loss := number(event.get("loss"))) is not None:
            self.evals[step] = loss
            if len(self.evals) > 2 * MOST_EVALS:
                self.evals = dict(sorted(self.evals.items(), key=itemgetter(1))[:MOST_EVALS])
        elif kind == "resume" and step is not None:
            self.evals = {at: loss for at, loss in self.evals.items() if at <= step}
            self.end, self.phase, self.resumed = {}, "", step
            self._worked, self.began = worked, (time, step)
        elif kind == "extend" and (total := whole(event.get("steps"))) is not None:
            self.total = total
        elif kind == "phase":
            self.phase = str(event.get("phase"))
        elif kind == "run_end":
            self.end = _shown(event)
        self.has_events = True
        if time is not None:
            self.updated = time

    @property
    def steps(self) -> int:
        """Completed steps."""
        if self.end and (ended := step_of(self.end)) is not None:
            return ended
        return self.resumed if self.resumed is not None else step_of(self.step) or 0

    @property
    def worked_s(self) -> float | None:
        """Seconds from each start to the last event before the next one, as observe/events.py `worked_seconds`."""
        if self.began[0] is None or self.updated is None:
            return None
        return self._worked + max(0.0, self.updated - self.began[0])

    def best(self) -> tuple[float | None, int | None]:
        """The lowest validation loss after the first step, and its step."""
        found = [(loss, step) for step, loss in self.evals.items() if step > 0]
        return min(found) if found else (None, None)


def _shown(event: Event) -> Event:
    """The fields of an event that the list of runs keeps in memory."""
    return {name: event[name] for name in FIELDS if isinstance(event.get(name), str | int | float)}
