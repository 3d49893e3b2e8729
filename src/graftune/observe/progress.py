"""How far long work has come: a bar on a terminal, plain lines elsewhere.

Three kinds of work: training steps with their figures, anything else that can be counted (examples, tensors, answers),
and work that cannot (`total` is 0), which only has a name and a clock. All of them estimate by finished units alone
(speed.Meter). A bar moves by itself. Plain output gets a `Beat` instead: a thread that says how far the work is when
nothing was written for some seconds, whatever the main thread is in the middle of. Asking the work itself to report
every few seconds was the alternative; one forward pass of a slow machine, one import or one large tensor breaks it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from graftune.observe.speed import NOTHING, Amounts, Meter, clock_text

Clock = Callable[[], float]
TRAINING = "training"
AT_LEAST = 1.0  # seconds between two plain lines
SILENCE = 4.0  # seconds after which plain output says something, at the beginning; grows with the work to LONGEST
LONGEST = 60.0
EARLIER = 0.25  # seconds by which work that reports often is before the beat: else both say the same
PERMANENT = (30.0, 600.0)  # seconds between two lines that stay above a bar: a twentieth of the run, within these


def patience(age: float) -> float:
    """Seconds that plain output may be silent for when work is `age` seconds old: a day's log must stay a log."""
    return min(LONGEST, max(SILENCE, age / 60))


class Progress:
    """What `Console.progress` yields; this one, used when quiet, shows nothing."""

    def __init__(self, total: int, done: int = 0, label: str = TRAINING, unit: str = "", clock: Clock = time.monotonic):
        self.total, self.done, self.label, self.unit, self.clock = total, done, label, unit, clock
        self.meter = Meter(total, done, clock=clock)
        self.began = clock()
        self.figures: list[str] = []
        self.without_floor = ""  # what is said in place of the share of the floor

    def update(
        self,
        done: int,
        *,
        loss: float | None = None,
        lr: float | None = None,
        tokens: int | None = None,
        amounts: Amounts = NOTHING,
    ) -> None:
        """`done` units are done; of training steps with their figures."""
        # The same count again means that the work is alive; it is no unit, and no time for one.
        fresh = done != self.done or tokens
        tok_s = self.meter.update(done, tokens or 0, amounts) if fresh else self.meter.tok_s
        self.done = done
        figures = _figures(loss, lr, tok_s if tokens else None)
        self.figures = [*figures, *self._rates()] if figures else self.figures

    def _rates(self) -> list[str]:
        """Of training, as far as they are known."""
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
        """The state of things on one line of a log."""
        if self.training:
            left = self.meter.left
            estimate = [f"left {clock_text(left)}"] if left is not None else []
            width = len(str(self.total))
            return f"step {self.done:>{width}}/{self.total}  {'  '.join([*self.figures, *estimate])}".rstrip()
        if not self.total:
            return f"{self.label}: {clock_text(self.age)} so far" if self.age >= 1 else self.label
        left = self.meter.left if self.done < self.total else None
        about = f", left {clock_text(left)}" if left is not None else ""
        return f"{self.label}: {self.count()}, {clock_text(self.age)}{about}"

    def count(self) -> str:
        return f"{self.done}/{self.total} {self.unit}".rstrip()


class LineProgress(Progress):
    """Plain lines. Of training: the first step, the last, and between them one every 5% of the steps or after
    `patience`, but not more than one a second. Of other work: a line at its beginning, one after `patience`, and one at
    its end, if it took a second. Work without a count is named only by the beat.
    """

    def __init__(
        self,
        total: int,
        done: int,
        label: str,
        write: Callable[[str], None],
        *,
        unit: str = "",
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(total, done, label, unit, clock)
        self._write = write
        self._shown: tuple[float, int, bool] | None = None  # of the last line: time, count, whether it had an estimate
        if total and not self.training:
            self._say(f"{label}: {self.count()}")

    def update(
        self,
        done: int,
        *,
        loss: float | None = None,
        lr: float | None = None,
        tokens: int | None = None,
        amounts: Amounts = NOTHING,
    ) -> None:
        super().update(done, loss=loss, lr=lr, tokens=tokens, amounts=amounts)
        if self._due():
            self._say(self.line())

    def beat(self) -> str:
        """What to say when nothing was written for a while."""
        if self.training and self.total:
            running = self.meter.since_last
            if running < 1.0 and self.figures:  # steps come quickly: nothing is stuck
                return self.line()
            return f"step {min(self.done + 1, self.total)}/{self.total}: running for {running:.0f} s"
        return self.line()

    def _due(self) -> bool:
        if self._shown is None:
            return True
        at, done, estimated = self._shown
        passed, made = self.clock() - at, self.done - done
        if self.done >= self.total:
            return made > 0 and (self.training or self.age >= AT_LEAST)
        if passed < AT_LEAST:
            return False
        if self.training and (made >= self.total / 20 or (not estimated and self.meter.left is not None)):
            return made > 0
        return passed >= patience(self.age) - EARLIER

    def _say(self, text: str) -> None:
        self._shown = (self.clock(), self.done, self.meter.left is not None)
        self._write(text)


class BarProgress(Progress):
    """One line of a rich live display, and of training a line with the loss that stays above it now and then."""

    def __init__(
        self,
        total: int,
        done: int,
        label: str,
        bar: Any,
        write: Callable[[str], None],
        *,
        unit: str = "",
        clock: Clock = time.monotonic,
    ):
        super().__init__(total, done, label, unit, clock)
        self._bar, self._write, self._shown = bar, write, clock()
        self.task = bar.add_task(label, total=total or None, completed=done, shown=self)

    def update(
        self,
        done: int,
        *,
        loss: float | None = None,
        lr: float | None = None,
        tokens: int | None = None,
        amounts: Amounts = NOTHING,
    ) -> None:
        super().update(done, loss=loss, lr=lr, tokens=tokens, amounts=amounts)
        self._bar.update(self.task, completed=done)
        if self.training and self._due():
            self._shown = self.clock()
            self._write(self.line())

    def _due(self) -> bool:
        """About twenty lines over a run, and the last step."""
        if self.done >= self.total:
            return True
        whole = self.meter.elapsed + (self.meter.left or 0.0)
        return self.clock() - self._shown >= min(PERMANENT[1], max(PERMANENT[0], whole / 20))

    def parts(self, width: int) -> list[tuple[str, str]]:
        """The line as (text, style), in at most `width` columns: what matters least is left out first."""
        figures = {text.split()[0]: text for text in self.figures}
        speed = next((text for text in self.figures if text.endswith("tok/s")), "")
        left = self.meter.left if self.done < self.total else None
        shown = {
            "label": (self.label, ""),
            "count": (self.count() if self.total else "", "green"),
            "loss": (figures.get("loss", ""), "bold"),
            "lr": (figures.get("lr", ""), ""),
            "speed": (speed, ""),
            "floor": (figures.get("floor", figures.get("floor:", "")), ""),
            "flops": (next((text for text in self.figures if text.endswith("FLOP/s")), ""), ""),
            "idle": (figures.get("host", ""), ""),
            "age": (clock_text(self.age), "yellow"),
            "left": (f"left {clock_text(left)}" if left is not None else "", "cyan"),
        }
        kept = fitting({name: text for name, (text, _) in shown.items()}, width)
        return [shown[name] for name in shown if name in kept]


def fitting(parts: dict[str, str], width: int, gap: int = 2) -> set[str]:
    """Names of the parts that fit beside each other, the important ones first."""
    kept: set[str] = set()
    used = 0
    for name in ("count", "loss", "label", "left", "speed", "floor", "age", "lr", "flops", "idle"):
        needed = len(parts.get(name, "")) + (gap if kept else 0)
        if parts.get(name) and (used + needed <= width or not kept):
            kept.add(name)
            used += needed
    return kept


def rich_bar(console: Any) -> Any:
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn
    from rich.text import Text

    class Line(ProgressColumn):
        def render(self, task: Any) -> Any:
            shown: BarProgress = task.fields["shown"]
            return Text.assemble(*_with_bar(shown, console.width, console.options.ascii_only), no_wrap=True)

    return RichProgress(
        Line(),
        console=console,
        refresh_per_second=4,
        # The streams are ours to manage: other people's prints must land where they were sent.
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _with_bar(shown: BarProgress, width: int, ascii_only: bool) -> list[tuple[str, str]]:
    """The parts with gaps, and a bar after the label if ten columns are left for one."""
    parts = shown.parts(width - 1)  # the last column makes some terminals wrap
    free = width - 1 - sum(len(text) + 2 for text, _ in parts)
    out: list[tuple[str, str]] = []
    for index, (text, style) in enumerate(parts):
        out.append((text if index == len(parts) - 1 else text + "  ", style))
        if index == 0 and shown.total and free >= 10 and len(parts) > 1:
            full = free * min(shown.done, shown.total) // shown.total
            cell = "#" if ascii_only else "━"
            out += [(cell * full, "blue"), (("-" if ascii_only else "━") * (free - full), "bright_black"), ("  ", "")]
    return out


class Beat:
    """A thread that calls `say` when `silent_for` reaches the patience of `age`, until it is stopped."""

    def __init__(self, silent_for: Callable[[], float], age: Callable[[], float], say: Callable[[], None]):
        self._silent_for, self._age, self._say = silent_for, age, say
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="graftune-beat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            left = patience(self._age()) - self._silent_for()
            if self._stopped.wait(max(left, 0.01)):
                return
            if self._silent_for() >= patience(self._age()):
                try:
                    self._say()
                except (OSError, ValueError):  # nobody reads any more; the main thread finds out for itself
                    return

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(1.0)


def _flops(rate: float) -> str:
    """Three digits, whatever the size."""
    value, unit = (rate / 1e12, "TFLOP/s") if rate >= 1e12 else (rate / 1e9, "GFLOP/s")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _figures(loss: float | None, lr: float | None, tok_s: float | None) -> list[str]:
    shown: Sequence[tuple[float | None, str]] = ((loss, "loss {:.3f}"), (lr, "lr {:.1e}"), (tok_s, "{:,.0f} tok/s"))
    return [form.format(value) for value, form in shown if value is not None]
