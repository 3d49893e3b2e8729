"""What a run says of itself: steps, evaluations, answers and warnings, to whoever watches and into metrics.jsonl."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.observe.console import Console, WorkProgress
from graftune.observe.events import EventLog
from graftune.observe.memory import device_bytes, human_bytes
from graftune.observe.plot import LivePlot, loss_plot, prepare
from graftune.observe.speed import NOTHING, Amounts, Meter, compared, is_far
from graftune.plan import Plan
from graftune.step.evaluate import EvalResult
from graftune.step.flops import StepFlops
from graftune.step.pipeline import Figures

OFF = {"cuda": 0.03, "cpu": 0.10}  # what a plan may be off by


@dataclass
class LiveSpeed:
    """What a step is worth beside its tokens, so that speed can be said live."""

    flops: StepFlops
    floor_ms: float | None = None  # of a micro-batch, as `graftune profile` measured it
    without_floor: str = ""  # said in place of it
    waited: Callable[[], float] | None = None  # seconds so far for which the host waited for the device
    _waited: float = 0.0

    def amounts(self, facts: dict[str, Any]) -> Amounts:
        """Of one step, once it is done."""
        waited = self.waited() if self.waited else 0.0
        idle, self._waited = waited - self._waited, waited
        floor = (self.floor_ms or 0.0) * facts["micro_batches"] / 1e3
        return Amounts(self.flops(facts["tokens"], facts["response_tokens"]), floor, idle)


class Reporter:
    def __init__(self, console: Console, log: EventLog, total: int, device: torch.device, plan: Plan | None):
        self.console, self.log, self.total, self.device = console, log, total, device
        self.plan, self.reported_plan, self.reported_gone = plan, False, False
        self.bar, self._phase = WorkProgress(total), ""
        self.live_plot = live_plot_of(log.path.parent)
        self.host_seconds: deque[float] = deque(maxlen=1000)  # to send a step and report those that are done
        self.live: LiveSpeed | None = None

    @property
    def meter(self) -> Meter:
        return self.bar.meter

    @contextmanager
    def steps(self, done: int) -> Iterator[None]:
        """The time in which steps are taken, `done` of them before."""
        with self.console.progress(self.total, done) as self.bar:
            self.bar.without_floor = self.live.without_floor if self.live else ""
            yield

    def warn(self, text: str, step: int = 0, kind: str = "") -> None:
        """`kind`: of the warnings that are given once in a run (guard.py)."""
        self.console.warn(text)
        self.log.emit("warning", step=step, text=text, **({"kind": kind} if kind else {}))

    def phase(self, name: str) -> None:
        """What the run does from here on: compiling, training, evaluating or finalising."""
        if name != self._phase:
            self._phase = name
            self.log.emit("phase", phase=name)

    def step(self, done: Figures, *, scaled: bool) -> None:
        facts, step = done.tag, done.tag["step"]
        amounts = self.live.amounts(facts) if self.live else NOTHING
        self.bar.update(step, loss=done.loss, lr=facts["lr"], tokens=facts["tokens"], amounts=amounts)
        figures = {"loss": done.loss, "grad_norm": done.grad_norm, "tok_s": self.meter.tok_s, "skipped": done.skipped}
        self.log.emit("step", **facts, **figures, **self._rates(), **done.more)
        if self._phase == "compiling":
            self.phase("training")
        if self.console.gone and not self.reported_gone:
            self.reported_gone = True
            self.log.emit("warning", step=step, text=f"the run goes on without a word ({self.console.gone})")
        if self.plan is not None and not self.reported_plan:
            self._memory(self.plan, step)
            self.reported_plan = True
        if done.skipped:
            what = "the gradient was not finite; this update was skipped"
            if scaled:
                what = "the gradient overflowed; this update was skipped and the loss scale halved"
            text = f"step {step}: {what}"
            self.warn(text, step)

    def profiled(self, document: dict[str, Any] | None, step: int) -> None:
        """An occasion of `profile_every` is over, if there is a document."""
        if document is not None:
            figures = {name: document[name] for name in ("step_ms", "plain_ms", "owned", "bottleneck")}
            self.log.emit("profile", step=step, **figures)
            if "not_written" in document:
                self.console.warn(f"profile.json was not written: {document['not_written']}")
            apart = f"; {compared(document)}" if is_far(document) else ""
            self.console.note(f"profile at step {step}: {figures['step_ms']:.1f} ms; {figures['bottleneck']}{apart}")

    def _rates(self) -> dict[str, float]:
        """Beside tokens per second, as far as they are known."""
        flops, floor, idle = self.meter.rates
        known = {"tflops": flops / 1e12, "floor_share": floor, "host_idle": idle}
        on_gpu = self.device.type == "cuda"
        return {name: value for name, value in known.items() if value or (name == "host_idle" and on_gpu)}

    def _memory(self, plan: Plan, step: int) -> None:
        """What the first step came to, beside what was planned."""
        measured = device_bytes(self.device).peak
        off = plan.expected / measured - 1
        self.console.note(
            f"memory: planned {human_bytes(plan.expected)}, measured {human_bytes(measured)} ({off:+.1%})"
        )
        self.log.emit("memory", step=step, planned=plan.expected, measured=measured, owners=plan.owners())

    def memory_in_all(self, step: int) -> None:
        """At a run's end: nothing is said unless it took more than was planned."""
        if self.plan is None:
            return
        allowed, most = OFF[self.plan.device], device_bytes(self.device).peak
        if most > (1 + allowed) * self.plan.expected:
            text = f"memory: the run took {human_bytes(most)}, more than the {human_bytes(self.plan.expected)} planned"
            self.warn(text, step)

    def evaluation(self, result: EvalResult, step: int, epoch: int) -> None:
        self.log.emit("eval", step=step, epoch=epoch, **result.document())
        figures = [f"loss {result.loss:.4f}"]
        figures += [] if result.perplexity is None else [f"perplexity {result.perplexity:.2f}"]
        figures += [f"{name.replace('_', ' ')} {value:.4f}" for name, value in result.figures.items()]
        self.console.note(f"validation at step {step}: {', '.join(figures)} ({result.response_tokens} response tokens)")

    @contextmanager
    def counted(self, label: str, total: int, unit: str, also: Callable[[], None]) -> Iterator[Callable[[int], None]]:
        """Other work than steps, with a callback for its count that calls `also` first (it looks for signals)."""
        with self.console.progress(total, label=label, unit=unit) as bar:

            def between(done: int) -> None:
                also()
                bar.update(done)

            yield between

    def silenced(self) -> Console:
        """The terminal is gone: from here on only the log is written. Returns a console that prints nothing."""
        self.console, self.bar = Console(quiet=True), WorkProgress(self.total)
        return self.console

    def plot(self) -> None:
        """The picture and the report of the run as it ended, or was stopped."""
        write_pictures(self.log.path.parent, self.live_plot, self.console.warn)

    def cost(self, captures: int) -> dict[str, Any]:
        """What the steps took of the host, and the run of the device."""
        median = statistics.median(self.host_seconds) * 1000 if self.host_seconds else None
        cost: dict[str, Any] = {"captures": captures, "host_ms": median}
        on_gpu = self.device.type == "cuda"
        return cost | ({"peak_device_memory": device_bytes(self.device).peak} if on_gpu else {})


def live_plot_of(folder: Path) -> LivePlot:
    return LivePlot(lambda: loss_plot(folder / "metrics.jsonl", folder / "loss.png", folder.name), first=prepare)


def write_pictures(folder: Path, plot: LivePlot, warn: Callable[[str], None]) -> None:
    """loss.png and report.html. A run does not fail for want of them."""
    if why := plot.finish():
        warn(f"loss.png was not drawn: {why}")
    from graftune.observe.report import write_report  # here: a start does not wait for it

    try:
        write_report(folder)
    except (OSError, GraftuneError) as error:
        warn(f"report.html was not written: {error}")
