"""Progress of long work: a bar on a terminal, plain lines elsewhere.

There are three kinds of work: training steps with their numbers, other work that can be counted (examples, tensors,
answers), and work that cannot be counted (`total` is 0), which only has a name and a clock. Estimates use finished
units alone (speed.Meter). rich redraws the bar by itself. For plain output a heartbeat thread writes a line when
nothing was written for some seconds, whatever the main thread is doing. Rejected: asking the work to report every few
seconds, because one slow forward pass, import or large tensor breaks that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from graftune.errors import printable
from graftune.observe.speed import NOTHING, Amounts, Meter, clock_text

ReadTime = Callable[[], float]
TRAINING = "training"
AT_LEAST = 1.0  # seconds between two plain lines
SILENCE = 4.0  # longest silence of plain output in seconds, at the beginning; grows with the work to LONGEST
GROWTH = 3  # the silence is the work's age divided by this, so that each is 1.5 times as long as the one before
LONGEST = 60.0
EARLIER = 0.25  # seconds by which a line of the work comes before the heartbeat's, which would repeat it
PERMANENT = (30.0, 600.0)  # seconds between two lines that stay above a bar: a twentieth of the run, within these


def longest_silence(age: float) -> float:
    """Seconds without plain output when work is `age` seconds old: a log must not fill with lines about one long
    step."""
    return min(LONGEST, max(SILENCE, age / GROWTH))


class WorkProgress:
    """What `Console.progress` yields; this one, used when quiet, shows nothing."""

    def __init__(
        self, total: int, done: int = 0, label: str = TRAINING, unit: str = "", clock: ReadTime = time.monotonic
    ):
        self.total, self.done, self.label, self.unit, self.clock = total, done, label, unit, clock
        self.meter = Meter(total, done, clock=clock)
        self.began = clock()
        self.loss = ""
        self.rates: list[str] = []
        self.without_floor = ""  # shown instead of the share of the floor
        self.activity = ""  # what the step is doing, where steps take long

    def update(
        self,
        done: int,
        *,
        loss: float | None = None,
        lr: float | None = None,
        tokens: int | None = None,
        amounts: Amounts = NOTHING,
        reward: float | None = None,
    ) -> None:
        """Show that `done` units are done; training steps also have numbers. A reward is shown in place of the loss."""
        # The same count again only says that the work is alive.
        fresh = done != self.done or tokens
        tok_s = self.meter.update(done, tokens or 0, amounts) if fresh else self.meter.tok_s
        self.done = done
        if loss is not None or lr is not None or tokens:
            self.loss = "" if loss is None else f"loss {loss:.3f}" if reward is None else f"reward {reward:.3f}"
            self.rates = [f"lr {lr:.1e}"] if lr is not None else []
            self.rates += [f"{tok_s:,.0f} tok/s"] if tokens else []
            self.rates += self._measured()
        self.show()

    def show(self) -> None:
        """Called after every update."""

    def _measured(self) -> list[str]:
        flops, floor, idle = self.meter.rates
        found = [_flops(flops)] if flops else []
        found += [f"floor {floor:.0%}"] if floor else [self.without_floor] if self.without_floor else []
        return found + ([f"host idle {idle:.0%}"] if idle else [])

    @property
    def age(self) -> float:
        return self.clock() - self.began

    @property
    def training(self) -> bool:
        return self.label == TRAINING

    def line(self) -> str:
        """The progress on one line of a log."""
        if self.training:
            left = self.meter.left
            estimate = [f"left {clock_text(left)}"] if left is not None else []
            width = len(str(self.total))
            numbers = "  ".join([*([self.loss] if self.loss else []), *self.rates, *estimate])
            return f"step {self.done:>{width}}/{self.total}  {numbers}".rstrip()
        if not self.total:
            return f"{self.label}: {clock_text(self.age)} so far" if self.age >= 1 else self.label
        left = self.meter.left if self.done < self.total else None
        about = f", left {clock_text(left)}" if left is not None else ""
        return f"{self.label}: {self.count()}, {clock_text(self.age)}{about}"

    def count(self) -> str:
        return f"{self.done}/{self.total} {self.unit}".rstrip()


class LineProgress(WorkProgress):
    """Plain lines. Training: the first step, the last, and between them one every 5% of the steps or after
    `longest_silence`, at most one per second. Other work: a line at its beginning, one after `longest_silence`, and one
    at its end if it took a second. Only the heartbeat names work without a count.
    """

    def __init__(
        self,
        total: int,
        done: int,
        label: str,
        write: Callable[[str], None],
        *,
        unit: str = "",
        clock: ReadTime = time.monotonic,
    ) -> None:
        super().__init__(total, done, label, unit, clock)
        self._write = write
        self._last: tuple[float, int, bool] | None = None  # the last line: time, count, whether it had an estimate
        if total and not self.training:
            self._write_line(f"{label}: {self.count()}")

    def show(self) -> None:
        if self._due():
            self._write_line(self.line())

    def heartbeat_line(self) -> str:
        """Written when nothing else was for a while."""
        if self.training and self.total:
            running = self.meter.since_last
            if running < 1.0 and (self.loss or self.rates):  # steps come quickly: nothing is stuck
                return self.line()
            doing = f", {self.activity}" if self.activity else ""
            return f"step {min(self.done + 1, self.total)}/{self.total}: running for {running:.0f} s{doing}"
        return self.line()

    def _due(self) -> bool:
        if self._last is None:
            return True
        at, done, estimated = self._last
        passed, made = self.clock() - at, self.done - done
        if self.done >= self.total:
            return made > 0 and (self.training or self.age >= AT_LEAST)
        if passed < AT_LEAST:
            return False
        if self.training and (made >= self.total / 20 or (not estimated and self.meter.left is not None)):
            return made > 0
        return passed >= longest_silence(self.age) - EARLIER

    def _write_line(self, text: str) -> None:
        self._last = (self.clock(), self.done, self.meter.left is not None)
        self._write(text)


class BarProgress(WorkProgress):
    """A task of rich's progress display. For training, a line with the loss is also printed above it now and then."""

    def __init__(
        self,
        total: int,
        done: int,
        label: str,
        bar: Any,
        write: Callable[[str], None],
        *,
        unit: str = "",
        clock: ReadTime = time.monotonic,
    ):
        super().__init__(total, done, label, unit, clock)
        self._bar, self._write, self._last = bar, write, clock()
        self.task = bar.add_task(label, total=total or None, completed=done, work=self)

    def show(self) -> None:
        self._bar.update(self.task, completed=self.done, description=printable(self.label))
        if self.training and self._due():
            self._last = self.clock()
            self._write(self.line())

    def _due(self) -> bool:
        """About twenty lines over a run, and the last step."""
        if self.done >= self.total:
            return True
        whole = self.meter.elapsed + (self.meter.left or 0.0)
        return self.clock() - self._last >= min(PERMANENT[1], max(PERMANENT[0], whole / 20))

    def numbers(self) -> tuple[str, str]:
        """What every terminal shows, and what a narrow one cuts off."""
        left = self.meter.left if self.done < self.total else None
        estimate = [f"left {clock_text(left)}"] if left is not None else []
        kept = [self.count() if self.total else "", self.activity or self.loss]
        return "  ".join(filter(None, kept)), "  ".join([*estimate, *self.rates, clock_text(self.age)])


def rich_bar(console: Any) -> Any:
    from rich.progress import BarColumn, ProgressColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column
    from rich.text import Text

    class Numbers(ProgressColumn):
        """Text of a task. Only `kept` numbers keep their width on a narrow terminal."""

        def __init__(self, kept: bool, style: str) -> None:
            super().__init__(Column(no_wrap=kept))
            self.kept, self.style = kept, style

        def render(self, task: Any) -> Any:
            kept, rest = task.fields["work"].numbers()
            return Text(kept if self.kept else rest, style=self.style, no_wrap=True, overflow="crop")

    class Label(ProgressColumn):
        def render(self, task: Any) -> Any:
            return Text(task.description, no_wrap=True, overflow="crop")

    return RichProgress(
        Label(),
        BarColumn(bar_width=None if console.width > 100 else 10),
        Numbers(kept=True, style="green"),
        Numbers(kept=False, style="cyan"),
        console=console,
        refresh_per_second=4,
        # Other programs' prints must reach the streams that they were sent to.
        redirect_stdout=False,
        redirect_stderr=False,
    )


class HeartbeatThread:
    """A thread that calls `write` when `silent_for` reaches the longest silence at this `age`, until it is stopped."""

    def __init__(self, silent_for: Callable[[], float], age: Callable[[], float], write: Callable[[], None]):
        self._silent_for, self._age, self._write = silent_for, age, write
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="graftune-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            left = longest_silence(self._age()) - self._silent_for()
            if self._stopped.wait(max(left, 0.01)):
                return
            if self._silent_for() >= longest_silence(self._age()):
                try:
                    self._write()
                except (OSError, ValueError):  # the stream is closed, which the main thread will find
                    return

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(1.0)


def _flops(rate: float) -> str:
    """Three digits, whatever the size."""
    value, unit = (rate / 1e12, "TFLOP/s") if rate >= 1e12 else (rate / 1e9, "GFLOP/s")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
