"""The run: owns the host, the clock and the disk. Everything per step is in step.py.

A run is a function of its place. `Progress` says which step is next and which evaluation was last; what is due follows
from it and from nothing else, so a run that was killed anywhere goes on from its last checkpoint and does, bit for
bit, what it would have done. Signals are noticed between micro-batches; what had added up since the last update is
dropped, the last whole step is saved.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from graftune import __version__
from graftune.batch import PackedBatch
from graftune.config import Config
from graftune.data.loader import Loader
from graftune.errors import GraftuneError
from graftune.observe.console import Console
from graftune.observe.console import Progress as Bar
from graftune.observe.events import EventLog, read_events
from graftune.observe.memory import human_bytes, peak_resident_bytes
from graftune.observe.plot import loss_plot
from graftune.observe.speed import Meter
from graftune.train import checkpoint
from graftune.train.answers import Answers
from graftune.train.checkpoint import Progress
from graftune.train.evaluate import EvalResult, evaluate
from graftune.train.prepare import FREE_ON_RESUME, Prepared, prepare_run, removed_unless_started, stored_config
from graftune.train.schedule import learning_rate
from graftune.train.step import Step

SAY_EVERY = 15.0  # seconds between two words from a long evaluation


@dataclass
class TrainResult:
    folder: Path
    steps: int
    stopped: str  # finished | early stop | interrupted
    first_eval: float | None
    best_eval: float | None
    summary: dict[str, Any] = field(default_factory=dict)
    signal: int = 0


class Interrupted(Exception):
    """A signal was seen between two micro-batches."""


def train(
    config: Config, *, console: Console, resume: str | None = None, overrides: dict[str, Any] | None = None
) -> TrainResult:
    if resume is not None:
        folder = Path(resume)
        run = Run(prepare_run(stored_config(folder, overrides or {}), console, folder), console)
        run.take_up()
        return run.go()
    with removed_unless_started() as made:
        run = Run(prepare_run(config, console, made=made), console)
        run.start()
    return run.go()


class Run:
    """One training run in its folder."""

    def __init__(self, prepared: Prepared, console: Console):
        self.folder, self.engine, self.console = prepared.folder, prepared.engine, console
        self.training, self.validation = training, validation = prepared.training, prepared.validation
        engine = prepared.engine
        self.config = config = engine.config
        self.progress = Progress()
        self.step = Step(
            engine.decoder,
            engine.arena,
            clip_mode=config.optim.clip_mode,
            dropout=engine.lora.dropout,
            seed=config.train.seed,
        )
        self.loader = Loader(
            training.examples,
            tokens_per_step=config.train.tokens_per_step,
            micro_capacity=config.train.tokens_per_micro_batch,
            seed=config.train.seed,
            fixed=False,
        )
        self.epoch_steps = [self.loader.steps_per_epoch(e) for e in range(config.train.epochs)]
        planned = sum(self.epoch_steps)
        self.total = min(config.train.max_steps or planned, planned)
        self.answers = Answers(validation, config, engine.tokenizer)
        self.base_answers: list[str] = []
        self.checkpoints = self.folder / "checkpoints"
        examples = [(e.tokens, e.supervised) for e in (*training.examples, *validation.examples)]
        self.examples_sha256 = _digest(json.dumps(examples))
        self.signal = 0
        self.closing = False  # all steps are done: what is left changes no checkpoint
        self.log: EventLog

    # Beginning

    def start(self) -> None:
        """A new folder: the configuration, the log's first line. From here on the run can be resumed."""
        self.log = EventLog(self.folder / "metrics.jsonl")
        facts = {"graftune": __version__, "torch": torch.__version__, "device": self.engine.runtime.describe()}
        self.log.emit(
            "run_start", **facts, **self.identity(), steps=self.total, trainable=len(self.engine.arena.weights)
        )
        # Last and whole: what has a config.yaml can be resumed, and half of one would be read as other settings.
        aside = self.folder / "config.yaml.part"
        self.config.save(aside)
        os.replace(aside, self.folder / "config.yaml")
        self._tell_start()

    def take_up(self) -> None:
        """An existing folder: the latest whole checkpoint, or the beginning if there is none yet."""
        found = checkpoint.latest(self.checkpoints)
        if found is not None:
            self.progress = checkpoint.load(found, self.engine.arena, self.identity())
            self.step.count.fill_(self.progress.updates)
        self.log = EventLog(self.folder / "metrics.jsonl")
        events = read_events(self.folder / "metrics.jsonl")
        starts = [event for event in events if event["event"] == "run_start"]
        if found is None and starts:
            checkpoint.check_identity(self.identity(), starts[-1], self.folder)
        for event in events:
            if event["event"] == "sample" and event.get("step") == 0 and "answers" in event:
                self.base_answers = list(event["answers"])
        if len(self.base_answers) != len(self.answers.questions):  # resumed with another number of samples
            self.base_answers = []
        self.log.emit("resume", step=self.progress.step)
        self._tell_start()
        where = f"step {self.progress.step}" if found else "the beginning: no checkpoint had been written"
        self.console.note(f"resuming {self.folder} at {where}")

    def identity(self) -> dict[str, str]:
        """What must be the same for a checkpoint to fit."""
        settings = {k: v for k, v in self.config.flat().items() if k not in FREE_ON_RESUME}
        text = json.dumps(settings, sort_keys=True)
        return {
            "data": self.training.sha256 + (self.validation.sha256 if self.config.data.eval_data else ""),
            "tokenizer or template": self.examples_sha256,
            "base": self.engine.base.sha256 + _digest(repr(self.engine.base.spec)),
            "settings": _digest(text),
        }

    # The run itself

    def go(self) -> TrainResult:
        stopped = "finished"
        try:
            with self._signals():
                if self._train() == "early":
                    stopped = "early stop"
                summary = self._finish(stopped)
        except Interrupted:
            self.step.discard()
            if not self.closing:  # by then the arena may hold the best step's weights
                self._save()
            self.log.emit("run_end", step=self.progress.step, stopped="interrupted")
            stopped, summary = "interrupted", {}
        finally:
            self.log.close()
        p = self.progress
        return TrainResult(self.folder, p.step, stopped, p.first_loss, p.best_loss, summary, self.signal)

    def _train(self) -> str:
        if not self.base_answers and self.answers.questions and not self.progress.step:
            self._ask_base()
        meter = Meter(self.total, self.progress.step)
        with self.console.progress(self.total, self.progress.step) as bar:
            while True:
                p = self.progress
                if self._evaluation_due():
                    with meter.paused():
                        self._evaluate()
                if p.step >= self.total:
                    return "done"
                if self.config.train.patience and p.stale >= self.config.train.patience:
                    return "early"
                if p.epoch_step == self.epoch_steps[p.epoch]:
                    p.epoch, p.epoch_step = p.epoch + 1, 0
                self._epoch(bar, meter)

    def _epoch(self, bar: Bar, meter: Meter) -> None:
        """Steps until an evaluation is due or the epoch ends."""
        p, settings = self.progress, self.config.train
        batches = self.loader.epoch(p.epoch, p.epoch_step)
        for micro_batches in batches:
            stats = self._one_step(micro_batches, meter)
            bar.update(p.step, loss=stats["loss"], tok_s=stats["tok_s"], lr=stats["lr"])
            self.log.emit("step", **stats)
            if stats["skipped"]:
                text = f"step {p.step}: the gradient was not finite; this update was skipped"
                self.console.warn(text)
                self.log.emit("warning", step=p.step, text=text)
            if self._evaluation_due() or p.step >= self.total:
                return
            if settings.save_every and p.step % settings.save_every == 0:
                self._save()

    def _one_step(self, micro_batches: list[PackedBatch], meter: Meter) -> dict[str, Any]:
        p, optim = self.progress, self.config.optim
        lr = learning_rate(p.step, self.total, optim)
        responses = sum(b.response_tokens for b in micro_batches)
        self.step.set_hyper(
            {
                "lr": lr,
                "beta1": optim.beta1,
                "beta2": optim.beta2,
                "eps": optim.eps,
                "weight_decay": optim.weight_decay,
                "divisor": float(max(1, responses)),
                "clip": optim.clip,
            }
        )
        for index, batch in enumerate(micro_batches):
            self._between()
            self.step.micro_step(batch.to(self.engine.runtime.device), draw=p.step * 4096 + index)
        loss, norm, skipped = self.step.update_step().tolist()
        p.step, p.epoch_step, p.updates = p.step + 1, p.epoch_step + 1, p.updates + (0 if skipped else 1)
        tokens = sum(len(b.tokens) for b in micro_batches)
        return {
            "step": p.step,
            "epoch": p.epoch,
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": tokens,
            "response_tokens": responses,
            "tok_s": meter.update(p.step, tokens),
            "skipped": bool(skipped),
        }

    # Evaluations and checkpoints

    def _evaluation_due(self) -> bool:
        """Before the first step, every eval_every steps, after each epoch and at the end; each once."""
        p, every = self.progress, self.config.train.eval_every
        if not self.validation.examples or p.last_eval == p.step:
            return False
        ends = p.epoch_step == self.epoch_steps[p.epoch] or p.step >= self.total
        return p.step == 0 or ends or (every > 0 and p.step % every == 0)

    def _evaluate(self) -> None:
        p = self.progress
        result = evaluate(
            self.engine.decoder,
            self.validation.examples,
            capacity=self.config.train.tokens_per_micro_batch,
            between=self._told("validating"),
        )
        self._record(result)
        better = math.isfinite(result.loss) and (p.best_loss is None or result.loss < p.best_loss)
        p.last_eval = p.step
        if p.step == 0:
            p.first_loss = result.loss
        elif better:
            p.best_loss, p.best_step, p.stale = result.loss, p.step, 0
        else:
            p.stale += 1
        self._save()

    def _record(self, result: EvalResult) -> None:
        p = self.progress
        self.log.emit("eval", step=p.step, epoch=p.epoch, **asdict(result))
        self.console.note(
            f"validation at step {p.step}: loss {result.loss:.4f}, perplexity {result.perplexity:.2f} "
            f"({result.response_tokens} response tokens)"
        )

    def _save(self) -> None:
        p = self.progress
        checkpoint.save(self.checkpoints, self.engine.arena, p, self.identity())
        checkpoint.prune(self.checkpoints, self.config.train.keep_last, p.best_step)

    # The end

    def _finish(self, stopped: str) -> dict[str, Any]:
        p, console = self.progress, self.console
        if not self.validation.examples:
            self._save()
        self.closing = True
        if p.best_step >= 0 and p.best_step != p.step:
            best = checkpoint.steps(self.checkpoints).get(p.best_step)
            if best is None:
                raise GraftuneError(
                    f"the checkpoint of step {p.best_step}, the best one, is gone",
                    where=str(self.checkpoints),
                    mend="restore it, or start a new run",
                )
            checkpoint.read_weights(best, self.engine.arena)
            console.note(f"keeping step {p.best_step}, the best on validation")
        if p.first_loss is not None and p.best_loss is not None and p.best_loss >= p.first_loss:
            console.warn("validation loss did not fall below where it started: the adapter does not help on this data")
        self.engine.save_adapter(self.folder / "adapter")
        summary: dict[str, Any] = {
            "best_step": p.best_step,
            "validation_loss": {"start": p.first_loss, "best": p.best_loss},
            "peak_memory": peak_resident_bytes(),
        }
        if self.answers.questions:
            summary |= self._compare()
        self.log.emit("run_end", step=p.step, stopped=stopped, **summary)
        loss_plot(self.folder / "metrics.jsonl", self.folder / "loss.png", self.folder.name)
        return summary

    def _ask_base(self) -> None:
        count = len(self.answers.questions)
        self.console.note(f"asking the base {count} unseen questions")
        self.base_answers = self.answers.ask(self.engine, adapted=False, between=self._between)
        self.log.emit("sample", step=0, answers=self.base_answers)

    def _compare(self) -> dict[str, Any]:
        """Base and tuned answers side by side, and their scores."""
        answers = self.answers
        if not self.base_answers:
            self._ask_base()
        self.console.note(f"asking the tuned model the same {len(answers.questions)} questions")
        tuned = answers.ask(self.engine, adapted=True, between=self._between)
        self.log.emit("sample", step=self.progress.step, answers=tuned)
        return answers.show(self.console, self.base_answers, tuned)

    # Signals and words

    def _between(self) -> None:
        if self.signal:
            self.console.note("stopping: saving a checkpoint")
            raise Interrupted

    def _told(self, what: str) -> Callable[[int], None]:
        """Between batches of what may take long: look for signals, and now and then say how far it is."""
        total, last = len(self.validation.examples), time.monotonic()

        def between(done: int) -> None:
            nonlocal last
            self._between()
            if time.monotonic() - last > SAY_EVERY and done < total:
                last = time.monotonic()
                self.console.note(f"{what}: {done} of {total} examples")

        return between

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM is noted; a second one acts at once."""

        def note(number: int, frame: FrameType | None) -> None:
            self.signal = number  # said in _between: a handler must not write to a stream that is being written to
            for kind in previous:
                signal.signal(kind, signal.SIG_DFL)

        previous = {}
        try:
            for kind in (signal.SIGINT, signal.SIGTERM):
                previous[kind] = signal.signal(kind, note)
        except ValueError:  # not the main thread (the Python API may be used from one): signals stay as they are
            previous = {}
        try:
            yield
        finally:
            for kind, handler in previous.items():
                signal.signal(kind, handler)

    def _tell_start(self) -> None:
        engine, train_ = self.engine, self.config.train
        spec, arena = engine.base.spec, engine.arena
        self.console.note(f"base: {engine.base.name} ({spec.family}, {spec.parameters / 1e6:.0f}M parameters)")
        self.console.note(f"device: {engine.runtime.describe()}")
        self.console.note(f"frozen weights: {engine.placement.base_dtype} ({engine.placement.why})")
        self.console.note(
            f"trained: {len(arena.weights) / 1e6:.2f}M values, {human_bytes(arena.nbytes)} with gradients and moments"
        )
        self.console.note(
            f"{self.total} steps of up to {train_.tokens_per_step} tokens in micro-batches of "
            f"{train_.tokens_per_micro_batch}; run folder {self.folder}"
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
