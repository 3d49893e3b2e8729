"""Predicts the steps of a planned run, and how long they take.

The steps are counted as the loader will pack them. The time is a quotient: the operations of all steps and evaluations
(step/flops.py) by a rate. On a GPU the rate is a share of the card's published one; on a CPU it is a share of what a
product of the same size reaches here, timed for a moment. Where no rate is known (experts, fetched weights, on a CPU a
file's quantised weights), only the steps are predicted, with the reason. Generated answers (samples, a metric) are not
part of the time, since their lengths are not known.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from graftune.data.encoded import lengths_of, responses_of
from graftune.kernels import nf4
from graftune.losses import choose, stores_reference
from graftune.plan import Job, Plan
from graftune.plan.cards import SUSTAINED
from graftune.session import loader_of
from graftune.settings import auto
from graftune.step.flops import StepFlops
from graftune.training.metric import USUAL_RECORDS
from graftune.training.resume import run_length

ON_CPU = 0.5  # share of a product's rate that steps reach on a CPU
TIMED = 0.3  # seconds
RECOMPUTED = {"none": 0.0, "selective": 1 / 4, "full": 1.0, "offload": 1.0}  # share of a forward pass


@dataclass(frozen=True)
class Expected:
    """What a run will do, as far as it is known before it starts."""

    steps: int
    tokens_per_step: int
    tokens: int  # of all steps
    lr: float
    seconds: float | None = None  # of steps and evaluations; None: unknown
    how: str = ""  # the rate that the time was computed with, or why there is none
    warning: str = ""  # if there are too few steps
    answers: int = 0  # generated for the metric, in all evaluations; not part of the time

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        lines = [f"{self.steps} steps of up to {self.tokens_per_step} tokens, learning rate {self.lr:g}"]
        if self.seconds is None:
            return [*lines, f"no time is expected here: {self.how}"]
        left_out = f"; the {self.answers} answers generated for the metric are not included" if self.answers else ""
        time = f"about {_duration(self.seconds)} ({self.how})"
        return [*lines, f"expected time of steps and evaluations, without generated answers: {time}{left_out}"]


def expected(job: Job, plan: Plan) -> Expected | None:
    """The steps of a planned run, and their time; None if it has no data yet."""
    if job.training is None:
        return None
    settings, lengths = job.config.train, lengths_of(job.training)
    loader = loader_of(job.config, job.training, plan.capacity, layout=job.layout)
    length = run_length(loader.steps_per_epoch, settings)
    share = length.total / sum(length.epoch_steps) * len(length.epoch_steps)  # in passes over the data
    tokens, responses = int(share * lengths.sum()), int(share * responses_of(job.training).sum())
    rate, how = _rate(job, plan, tokens // length.total)
    seconds = _operations(job, plan, tokens, responses, length.total) / rate if rate else None
    few, run = auto.warning(job.config, length.total, len(job.training)), job.config.run
    answers = min(run.metric_records or USUAL_RECORDS, len(job.validation)) if run.metric else 0
    answers *= _evaluations(job, length.total)
    return Expected(length.total, settings.step_tokens, tokens, job.config.optim.peak_lr, seconds, how, few, answers)


def _evaluations(job: Job, steps: int) -> int:
    """The number of evaluations: before the first step, every `eval_every` steps and after each epoch."""
    settings = job.config.train
    return 1 + math.ceil(settings.epochs) + (steps // settings.eval_every if settings.eval_every else 0)


def _operations(job: Job, plan: Plan, tokens: int, responses: int, steps: int) -> float:
    """Floating-point operations of all steps and evaluations."""
    spec, full = job.base.spec, job.config.train.method != "lora"
    assert job.training is not None
    loss = job.loss or choose(job.config.train)
    further = loss.forwards(job.layout)
    step = StepFlops.of(spec, lengths_of(job.training), full=full, forwards=further)
    forward = 1 / (3 if full else 2)
    total = step(tokens, responses) * (1 + forward * RECOMPUTED[plan.recompute])
    once = bool(loss.reference) and stores_reference(job.layout)  # the reference's pass over the data
    if once:
        counts = int(lengths_of(job.training).sum()), int(responses_of(job.training).sum())
        total += forward * StepFlops.of(spec, lengths_of(job.training), full=full)(*counts)
    if job.validation:
        held_out = StepFlops.of(spec, lengths_of(job.validation), full=full)
        counts = int(lengths_of(job.validation).sum()), int(responses_of(job.validation).sum())
        total += (once + _evaluations(job, steps) * (1 + further)) * forward * held_out(*counts)
    return total


def _rate(job: Job, plan: Plan, tokens: int) -> tuple[float, str]:
    """Operations per second of steps with so many tokens, and how it was found; 0: unknown, and why."""
    placed = job.placement
    if placed.fetched:
        return 0.0, "the base's weights are fetched for every product, at a rate that only a run shows"
    if job.base.spec.experts:
        return 0.0, "the time of experts depends on how many tokens each of them gets"
    if job.card is not None:
        rate = SUSTAINED * job.card.rate
        return rate, f"at {SUSTAINED:.0%} of the card's published {job.card.rate / 1e12:.0f} TFLOP/s; not measured"
    if placed.base_dtype in ("keep", "fp8"):
        stored = "as its file stores it" if placed.base_dtype == "keep" else "in fp8"
        return 0.0, f"the base is held {stored}, and its weights are dequantised for every product; steps show the time"
    packed = placed.base_dtype == "nf4"
    product = timed_product(min(tokens, plan.capacity), job.base.spec.width, job.runtime.compute, packed=packed)
    which = "a product with NF4 weights" if packed else "a product"
    return ON_CPU * product, f"at {ON_CPU:.0%} of the {product / 1e9:.0f} GFLOP/s that {which} reaches here just now"


def timed_product(rows: int, width: int, dtype: torch.dtype, *, packed: bool = False) -> float:
    """Floating-point operations per second of a product of that size on the CPU. `packed`: with NF4 weights, which are
    dequantised for every product."""
    x, weight = torch.randn(rows, width, dtype=dtype), torch.randn(3 * width, width, dtype=dtype)
    stored = nf4.quantise(weight) if packed else None
    count, began = 0, time.perf_counter()
    while count < 2 or time.perf_counter() - began < TIMED:
        if stored is not None:
            nf4.dequantise(stored, out=weight)
        torch.nn.functional.linear(x, weight)
        count += 1
    return count * 2 * rows * weight.numel() / (time.perf_counter() - began)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
