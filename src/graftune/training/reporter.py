"""Reports of a run: steps, evaluations, warnings and costs, on the console and in metrics.jsonl."""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graftune.batch import Example
from graftune.data.encoded import lengths_of
from graftune.data.pack import Capacities
from graftune.errors import GraftuneError
from graftune.observe.console import Console
from graftune.observe.events import EventLog
from graftune.observe.memory import device_bytes, human_bytes
from graftune.observe.plot import LivePlot
from graftune.observe.progress import WorkProgress
from graftune.observe.speed import NOTHING, Amounts, Meter, compared, is_far
from graftune.plan import Plan
from graftune.session import SessionParts
from graftune.step.evaluate import EvalResult
from graftune.step.flops import StepFlops
from graftune.step.pipeline import Figures
from graftune.training import floors
from graftune.training.metric import Scores

ROUTING_EVERY = 50  # steps between two tables of tokens per expert in the log
OFF = {"cuda": 0.03, "cpu": 0.10}  # how far a run may exceed its plan


@dataclass
class LiveSpeed:
    """The floating-point operations and the floor of a step, from which its speed is computed while it trains."""

    flops: StepFlops
    floor_ms: float | None = None  # of a micro-batch, as `graftune profile` measured it
    without_floor: str = ""  # shown in place of the floor
    waited: Callable[[], float] | None = None  # seconds so far for which the host waited for the device
    _waited: float = 0.0

    def amounts(self, facts: dict[str, Any]) -> Amounts:
        """The operations, the floor and the seconds of waiting of a step that is done."""
        waited = self.waited() if self.waited else 0.0
        idle, self._waited = waited - self._waited, waited
        floor = (self.floor_ms or 0.0) * facts["micro_batches"] / 1e3
        return Amounts(self.flops(facts["tokens"], facts["response_tokens"]), floor, idle)


def live_speed(parts: SessionParts, examples: Sequence[Example], shape: Capacities | None) -> LiveSpeed:
    full = parts.config.train.method != "lora"
    forwards = parts.loss.forwards(parts.loss.layout(examples))
    flops = StepFlops.of(parts.base.spec, lengths_of(examples), full=full, forwards=forwards)
    if parts.runtime.device.type != "cuda":
        return LiveSpeed(flops)
    known, lacking, loop = floors.known(parts, shape, forwards), floors.lacks(parts), parts.pipeline
    without = f"none ({lacking[0]})" if lacking else "not measured (graftune profile RUN)"
    return LiveSpeed(flops, known, "" if known else f"floor: {without}", lambda: loop.waited)


class Reporter:
    def __init__(
        self,
        console: Console,
        log: EventLog,
        total: int,
        device: torch.device,
        plan: Plan | None = None,
        live: LiveSpeed | None = None,
    ):
        self.console, self.log, self.total, self.device, self.live = console, log, total, device, live
        self.plan, self.reported_plan, self.reported_gone = plan, False, False
        self.bar, self._phase = WorkProgress(total), ""
        self.live_plot = LivePlot(log.path.parent)
        if device.type == "cuda" and log.path != Path(os.devnull):
            self.live_plot.prepare()
        self.host_seconds: deque[float] = deque(maxlen=1000)  # to send a step and report those that are done
        self._attention, self._captures = "", 0  # as last reported

    @property
    def meter(self) -> Meter:
        return self.bar.meter

    @contextmanager
    def steps(self, done: int) -> Iterator[None]:
        """Around all steps, `done` of which were taken before. Shows their progress."""
        with self.console.progress(self.total, done) as self.bar:
            self.bar.without_floor = self.live.without_floor if self.live else ""
            yield

    def warn(self, text: str, step: int = 0, kind: str = "") -> None:
        """Print and log a warning. `kind`: of those that are given once in a run (guard.py)."""
        self.console.warn(text)
        self.log.emit("warning", step=step, text=text, **({"kind": kind} if kind else {}))

    def phase(self, name: str) -> None:
        """Log what the run does from here on: compiling, sampling, training, evaluating or finalising."""
        if name != self._phase:
            self._phase = name
            self.log.emit("phase", phase=name)

    def sending(self) -> None:
        """A step is about to be sent. The first one on a GPU compiles kernels and captures graphs."""
        if self._phase not in ("compiling", "training"):
            compiles = self.device.type == "cuda" and not self.host_seconds
            self.phase("compiling" if compiles else "training")

    def sent(self, parts: SessionParts, step: int) -> None:
        """Report what the first batch of a shape causes: a choice of the fastest attention, and another capture."""
        backend, captures = parts.step.backend, parts.pipeline.captures
        if backend != (self._attention or parts.attention.backend):
            self.console.note(f"attention: {backend}, timed as the fastest on these documents")
        if captures > max(1, self._captures):
            self.console.warn(f"step {step}: captured again, for batches of another shape")
        self._attention, self._captures = backend, captures

    def step(self, done: Figures, *, scaled: bool) -> None:
        facts, step = done.tag, done.tag["step"]
        amounts = self.live.amounts(facts) if self.live else NOTHING
        self.bar.update(
            step, loss=done.loss, lr=facts["lr"], tokens=facts["tokens"], amounts=amounts, reward=facts.get("reward")
        )
        figures = {"loss": done.loss, "grad_norm": done.grad_norm, "tok_s": self.meter.tok_s, "skipped": done.skipped}
        self.log.emit("step", **facts, **figures, **self._rates(), **done.more)
        if done.routing and (step == 1 or step % ROUTING_EVERY == 0 or step == self.total):
            layers = [
                {"layer": one.layer, "entropy": round(one.entropy, 4), "tokens": one.tokens} for one in done.routing
            ]
            self.log.emit("routing", step=step, layers=layers)
        if self._phase == "compiling":
            self.phase("training")
        if self.console.gone and not self.reported_gone:
            self.reported_gone = True
            self.log.emit("warning", step=step, text=f"the run goes on without a console ({self.console.gone})")
        if self.plan is not None and not self.reported_plan:
            self._memory(self.plan, step)
            self.reported_plan = True
        if done.skipped:
            what = "the gradient was not finite; this update was skipped"
            if scaled:
                what = "the gradient overflowed; this update was skipped and the loss scale halved"
            text = f"step {step}: {what}"
            self.warn(text, step)

    def profiled(self, document: dict[str, Any], step: int) -> None:
        """An occasion of `profile_every` is over."""
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
        """Compare the memory of the first step with the plan."""
        measured = device_bytes(self.device).peak
        off = plan.expected / measured - 1
        self.console.note(
            f"memory: planned {human_bytes(plan.expected)}, measured {human_bytes(measured)} ({off:+.1%})"
        )
        self.log.emit("memory", step=step, planned=plan.expected, measured=measured, owners=plan.owners())

    def memory_in_all(self, step: int) -> None:
        """At the end of a run: warn if it took more memory than was planned."""
        if self.plan is None:
            return
        allowed, most = OFF[self.plan.device], device_bytes(self.device).peak
        if most > (1 + allowed) * self.plan.expected:
            planned, over = human_bytes(self.plan.expected), most / self.plan.expected - 1
            text = f"memory: the run took {human_bytes(most)}, {over:.0%} more than the {planned} planned"
            self.warn(text, step)

    def evaluation(self, result: EvalResult, step: int, epoch: int, scores: Scores | None = None) -> None:
        measured = {} if scores is None else scores.document()
        # The page, the report and the trackers show whatever is among the metrics.
        own = {name: value for name, value in result.figures.items() if math.isfinite(value)}
        metrics = {"metrics": measured.get("metrics", {}) | own} if own else {}
        self.log.emit("eval", step=step, epoch=epoch, **result.document(), **measured | metrics)
        figures = [f"loss {result.loss:.4f}"]
        figures += [] if result.perplexity is None else [f"perplexity {result.perplexity:.2f}"]
        figures += [f"{name.replace('_', ' ')} {value:.4f}" for name, value in result.figures.items()]
        figures += [f"{name} {value:.4f}" for name, value in measured.get("metrics", {}).items()]
        figures += [f"{scores.failed} of {scores.records} metric calls failed"] if scores and scores.failed else []
        self.console.note(f"validation at step {step}: {', '.join(figures)} ({result.response_tokens} response tokens)")

    def silence(self) -> None:
        """The terminal is gone: from here on only the log is written."""
        self.console, self.bar = Console(quiet=True), WorkProgress(self.total)

    def end(self, parts: SessionParts, step: int, stopped: str, **figures: Any) -> None:
        """Log the end of a run, draw its picture and write its report."""
        self.log.emit("run_end", step=step, stopped=stopped, **figures | self.cost(parts))
        write_pictures(self.log.path.parent, self.live_plot, self.console.warn)

    def cost(self, parts: SessionParts) -> dict[str, Any]:
        """Host time of a step, captures, the attention backend and, on a GPU, the peak of its memory."""
        median = statistics.median(self.host_seconds) * 1000 if self.host_seconds else None
        cost: dict[str, Any] = {"captures": parts.pipeline.captures, "host_ms": median}
        if self.device.type == "cuda":
            cost["peak_device_memory"] = device_bytes(self.device).peak
        return cost | {"attention": parts.step.backend}


def write_pictures(folder: Path, plot: LivePlot, warn: Callable[[str], None]) -> None:
    """Draw loss.png and write report.html. A run does not fail if they cannot be written."""
    if why := plot.finish():
        warn(f"loss.png was not drawn: {why}")
    from graftune.observe.report import write_report  # imported late: a start does not wait for it

    try:
        write_report(folder)
    except (OSError, GraftuneError) as error:
        warn(f"report.html was not written: {error}")
