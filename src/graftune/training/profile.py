"""`graftune profile`: profiles the steps of an existing run, or of the run that settings describe, outside of a run.

The data, the plan, the session and the loop are those of a run (prepare.py), so what is profiled is what a run does.
Steps really train, in memory; only the profile is kept.
"""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from graftune.model.context import micro_batch_id
from graftune.model.feed_forward.routing import LayerRouting
from graftune.observe.console import Console
from graftune.observe.profile import Profile
from graftune.settings.config import Config
from graftune.step.schedule import hyperparameters
from graftune.training import floors
from graftune.training.prepare import Prepared, prepare_run
from graftune.training.profiler import facts_of, profiled
from graftune.training.ranks import SingleProcess
from graftune.weights import checkpoint
from graftune.weights.checkpoint import Progress

EVALUATED = 8  # examples


def profile(config: Config, console: Console, steps: int) -> Profile:
    """Profile at least `steps` steps. The profile's facts describe the machine and the model."""
    with ExitStack() as held:
        quiet = config.replace(samples=0, score=False)
        place = Path(config.run.out or ".")  # nothing is written there
        prepared = prepare_run(quiet, console, held, lambda config, data: place, SingleProcess())
        return _profile(prepared, console, steps)


def _profile(prepared: Prepared, console: Console, steps: int) -> Profile:
    send = Sender(prepared)
    parts = prepared.parts
    device = parts.runtime.device
    with console.working("profiling steps"):
        found = profiled(parts.pipeline, send, device, steps)
    found.facts |= facts_of(parts, send.shape)
    found.facts["shape"] |= {"micro_batches": send.micro_batches / send.sent, "tokens": send.tokens / send.sent}
    with console.working("timing an evaluation and a checkpoint"):
        found.beside = _beside(prepared)
    lacking = floors.lacks(parts)
    if lacking or send.shape is None:
        found.facts["floor_note"] = lacking[1] if lacking else ""
        return found
    forwards = parts.loss.forwards(send.loader.layout)
    key = floors.key_of(parts, send.shape, forwards)
    work = floors.work_of(parts, send.shape, send.lengths, forwards, send.routing)
    del parts, prepared
    send.close()
    gc.collect()
    torch.cuda.empty_cache()
    ms = floors.measured(key, work, device, console)
    found.facts["floor_ms"] = None if ms is None else ms * found.facts["shape"]["micro_batches"]
    return found


class Sender:
    """Sends one step after the other over the training data, and starts over when all epochs are done."""

    def __init__(self, prepared: Prepared):
        parts, examples = prepared.parts, prepared.data.training.examples
        if examples.store.reference is not None:
            examples.store.reference[:] = 0.0  # the time of a step does not depend on them
        self.parts, self.config = parts, parts.config
        self.loader = parts.loader(examples)
        self.shape = parts.fix_shape(self.loader, self.config.train.epochs)
        self.steps = self._steps()
        self.sent = self.tokens = self.micro_batches = 0
        self.lengths = self._lengths()
        self.routing: Sequence[LayerRouting] = ()  # of the latest step that reported it

    def __call__(self) -> None:
        epoch, place, micro_batches = next(self.steps)
        loader, optim = self.loader, self.config.optim
        hyper = hyperparameters(optim, divisor=loader.divisor(epoch, place))
        ids = [micro_batch_id(self.sent, number) for number in loader.bins(epoch, place)]
        self.parts.pipeline.step(micro_batches, hyper, ids)
        for done in self.parts.pipeline.finished():
            self.routing = done.routing or self.routing
        self.sent += 1
        self.tokens += loader.counts(epoch, place)[0]
        self.micro_batches += len(micro_batches)

    def _lengths(self) -> tuple[int, ...]:
        """Lengths of the documents of the first micro-batch, and of the padding documents that fill it up."""
        if self.shape is None:
            return ()
        held = [int(self.loader.lengths[index]) for index in self.loader.plan(0)[0][0]]
        rest = self.shape.capacity - sum(held)
        return *held, *([self.shape.longest] * (rest // self.shape.longest)), *filter(None, [rest % self.shape.longest])

    def close(self) -> None:
        """Release the model and the device's memory."""
        self.steps.close()
        self.parts.close()

    def _steps(self) -> Generator[tuple[int, int, list[Any]], None, None]:
        while True:
            for epoch in range(math.ceil(self.config.train.epochs)):
                for place, staged in enumerate(self.loader.epoch(epoch, 0, self.parts.pipeline.stage)):
                    yield epoch, place, staged


def _beside(prepared: Prepared) -> dict[str, float]:
    """Milliseconds of an evaluation and of a checkpoint, which a run makes between steps."""
    parts, found = prepared.parts, dict[str, float]()
    examples = prepared.data.validation.examples[:EVALUATED]
    if len(examples):
        if parts.fixed_shapes:
            parts.evaluated(examples)  # untimed: kernels are compiled and plans made for this new shape
        found[f"evaluation of {len(examples)} examples"] = _ms(lambda: parts.evaluated(examples))
    with tempfile.TemporaryDirectory() as folder:
        scaler = parts.step.scaler
        found["checkpoint"] = _ms(lambda: checkpoint.save(Path(folder), parts.arena, Progress(), {}, scaler))
    return found


def _ms(work: Callable[[], object]) -> float:
    """Milliseconds that `work` takes. An evaluation and a checkpoint end with the host waiting for the device."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3
