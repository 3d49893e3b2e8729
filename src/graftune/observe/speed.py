"""Tokens and operations per second over the last steps, the share of the floor, and the time left.

A moving window rather than the mean of the whole run: the first steps (page faults, autotuning, capture) would weigh on
the figure for hours, and a machine that slows down would not show it. The first step, which may include minutes of
compiling, is dropped from both figures once there is a second one; until then there is no estimate. Time spent paused
(evaluation, checkpoints, samples) counts in neither figure; the time left is that of the training steps alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

FAR = 0.05  # share by which a profiled step may differ from a plain one


class Amounts(NamedTuple):
    flops: float = 0.0
    floor: float = 0.0  # seconds that the floor would have taken; 0: not known
    idle: float = 0.0  # seconds for which the host waited for the device


NOTHING = Amounts()


class _Mark(NamedTuple):
    """Sums up to the end of a step."""

    seconds: float  # of working time
    steps: int
    tokens: int
    amounts: Amounts


class Meter:
    """Feed it every finished step; `clock` is replaced in tests."""

    def __init__(
        self, total: int, done: int = 0, *, window: int = 20, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.total, self.done, self._clock = total, done, clock
        self._marks: deque[_Mark] = deque(maxlen=window + 1)
        self._tokens, self._paused = 0, 0.0
        self._warm = False  # the first step no longer counts
        self._started = clock()
        self._marks.append(_Mark(0.0, done, 0, NOTHING))

    @property
    def elapsed(self) -> float:
        """Seconds since the start, pauses left out."""
        return self._clock() - self._started - self._paused

    @property
    def since_last(self) -> float:
        """Seconds since the last step ended, pauses left out."""
        return self.elapsed - self._marks[-1].seconds

    def update(self, step: int, tokens: int, amounts: Amounts = NOTHING) -> float:
        """Note that `step` (counted from 1) ended and took `tokens`; returns tokens per second."""
        self.done = step
        self._tokens += tokens
        total = Amounts(*(a + b for a, b in zip(self._marks[-1].amounts, amounts, strict=True)))
        self._marks.append(_Mark(self.elapsed, step, self._tokens, total))
        if not self._warm and len(self._marks) > 2:
            self._marks.popleft()
            self._warm = True
        return self.tok_s

    @property
    def tok_s(self) -> float:
        span = self._span()
        return span.tokens / span.seconds if span.seconds > 0 else 0.0

    @property
    def rates(self) -> Amounts:
        """Operations per second, the share of the floor's speed, and the share of the time the host is idle."""
        span = self._span()
        return Amounts(*(amount / span.seconds for amount in span.amounts)) if span.seconds > 0 else NOTHING

    @property
    def left(self) -> float | None:
        """Seconds until `total` steps are done at the window's pace; None until there is a step besides the first."""
        if self.done >= self.total:
            return 0.0
        span = self._span()
        return (self.total - self.done) * span.seconds / span.steps if self._warm and span.steps > 0 else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens inside: `with meter.paused(): evaluate(...)`."""
        since = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - since

    def _span(self) -> _Mark:
        first, last = self._marks[0], self._marks[-1]
        amounts = Amounts(*(b - a for a, b in zip(first.amounts, last.amounts, strict=True)))
        return _Mark(last.seconds - first.seconds, last.steps - first.steps, last.tokens - first.tokens, amounts)


def clock_text(seconds: float) -> str:
    """0:05:12; days are counted in hours."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def compared(found: Mapping[str, Any]) -> str:
    """Compares a profiled step with a plain one, in a sentence. A plain step must have been timed."""
    step, plain = found["step_ms"], found["plain_ms"]
    text = f"a profiled step takes {ms_text(step)} ms, a plain one {ms_text(plain)} ms ({step / plain - 1:+.1%})"
    if is_far(found):
        text += ": too far apart to trust single operations; profile more steps on a quiet machine"
    return text


def is_far(found: Mapping[str, Any]) -> bool:
    """Whether profiled and plain steps differ by too much."""
    return bool(found["plain_ms"]) and abs(found["step_ms"] / found["plain_ms"] - 1) > FAR


def ms_text(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:.1f}"
