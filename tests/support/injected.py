"""An infinite number in one micro-batch, from inside the forward pass: the embedding row of one token is infinite, and
only one micro-batch has that token. Run on a CPU by tests/training/test_numbers.py and captured by
tests/gpu/test_numbers.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from graftune.batch import Example, PackedBatch
from graftune.data.pack import Capacities, pack
from graftune.model.frozen import Dense
from graftune.step.pipeline import Figures, Pipeline
from graftune.step.step import Step
from tests.support import tiny
from tests.support.oracle import Ours

BAD = 5  # the token
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01, "clip": 1.0}
SHAPE = Capacities(160, 8, 128, 64)
STEPS, BAD_STEP = 6, 3  # of the run that has it, from 0

Make = Callable[[], tuple[Ours, Step, Any]]


class Run(NamedTuple):
    figures: list[Figures]
    state: list[torch.Tensor]
    count: int


def poison(ours: Ours) -> None:
    """On a model whose head is not its embedding: there every micro-batch would read the row."""
    table = ours.decoder.embedding
    assert isinstance(table, Dense) and not ours.decoder.spec.tied
    table.weight[BAD] = float("inf")


def examples(seed: int, *lengths: int, bad: bool = False) -> list[Example]:
    drawn = torch.Generator().manual_seed(seed)
    rows = [torch.randint(BAD + 1, tiny.VOCAB, (n,), generator=drawn).tolist() for n in lengths]
    if bad:
        rows[-1][2] = BAD
    return [Example(row, [i > 4 for i in range(len(row))]) for row in rows]


def batches(step: int, *, fixed: bool) -> list[PackedBatch]:
    """Three micro-batches, the second of which has the token in the bad step."""
    parts = [examples(3 * step + i, 20 + i, 31 - step, bad=(step, i) == (BAD_STEP, 1)) for i in range(3)]
    return [pack(part, shape=SHAPE if fixed else None) for part in parts]


def send(loop: Pipeline, packed: list[PackedBatch], number: int = 0, **hyper: float) -> None:
    divisor = float(sum(batch.response_tokens for batch in packed))
    seeds = [16 * number + place for place in range(len(packed))]
    loop.step([loop.stage(batch) for batch in packed], HYPER | hyper | {"divisor": divisor}, seeds, number)


def run(make: Make, steps: list[int], *, fixed: bool) -> Run:
    torch.manual_seed(5)  # of the adapters
    ours, step, loop = make()
    poison(ours)
    found: list[Figures] = []
    for number in steps:
        send(loop, batches(number, fixed=fixed), number)
        found += loop.finished()
    found += loop.finished(wait=True)
    assert not ours.arena.grads.any() and not step.loss_sum and not step.token_sum
    arena = ours.arena
    return Run(found, [x.clone() for x in (arena.weights, arena.m, arena.v, arena.compute)], int(step.count))


def skips_exactly_that_update(make: Make, *, fixed: bool) -> None:
    """Bit for bit the run in which that step did not happen."""
    every = list(range(STEPS))
    whole = run(make, every, fixed=fixed)
    without = run(make, [n for n in every if n != BAD_STEP], fixed=fixed)
    assert [figures.tag for figures in whole.figures if figures.skipped] == [BAD_STEP]
    bad = whole.figures[BAD_STEP]
    assert not torch.tensor([bad.loss, bad.grad_norm]).isfinite().all()
    assert [f for f in whole.figures if not f.skipped] == without.figures
    assert all(torch.equal(a, b) for a, b in zip(whole.state, without.state, strict=True))
    assert whole.count == without.count == STEPS - 1 and bool(whole.state[0].isfinite().all())


def counts_its_tokens(make: Make, *, fixed: bool) -> None:
    """The device's own count of response tokens is the planned one, and another where a label is lost on the way."""
    _, _, loop = make()
    for number in range(4):
        packed = batches(number, fixed=fixed)
        planned = sum(batch.response_tokens for batch in packed)
        if number == 2:
            packed[1].labels[int((packed[1].labels >= 0).nonzero()[0])] = -1
        send(loop, packed, number)
        (figures,) = loop.finished(wait=True)
        assert figures.response_tokens == planned - (number == 2) and not figures.skipped
