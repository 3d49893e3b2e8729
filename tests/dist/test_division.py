"""One plan, divided: every bin once, as many for each rank, and the empty ones that even it out add nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from graftune.batch import Example
from graftune.data.loader import Loader
from graftune.data.pack import capacities, divided, pack
from graftune.losses import Anchored, CrossEntropy
from graftune.ranks import Share
from graftune.settings.sections import LoraConfig
from graftune.step.evaluate import evaluate
from graftune.step.step import Step
from graftune.step.tail import CONTROL_FLAGS, PIECES, Tail, signals
from tests.support import oracle, tiny


def some_examples(count: int = 40, seed: int = 3) -> list[Example]:
    draw = random.Random(seed)
    lengths = [draw.randint(3, 60) for _ in range(count)]
    return [Example([1 + n] * length, [i > 1 for i in range(length)], n) for n, length in enumerate(lengths)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("count", [1, 4, 5, 13])
def test_every_bin_once_and_as_many_for_each(size: int, count: int) -> None:
    draw = random.Random(size * 100 + count)
    lengths = np.array([draw.randint(1, 5000) for _ in range(3 * count)])
    bins = [list(range(3 * n, 3 * n + 1 + draw.randint(0, 2))) for n in range(count)]
    parts = [divided(bins, lengths, Share(rank, size)) for rank in range(size)]
    numbers = sorted(number for part in parts for number in part)
    assert numbers == list(range(len(numbers))) and len({len(part) for part in parts}) == 1
    assert len(parts[0]) == -(-count // size) and all(part == sorted(part) for part in parts)


def test_costs_are_balanced() -> None:
    lengths = np.array([100, 100, 100, 100, 10, 10, 10, 10])
    parts = [divided([[n] for n in range(8)], lengths, Share(rank, 4)) for rank in range(4)]
    assert [sum(lengths[part]) for part in parts] == [110] * 4
    one_long = np.array([30_000, *[1000] * 30])  # as many tokens, and most of the attention
    first, second = (divided([[0], list(range(1, 31)), [1], [1]], one_long, Share(rank, 2)) for rank in range(2))
    assert {0, 1} != set(first) and {0, 1} != set(second)


@pytest.mark.parametrize("fixed", [False, True])
def test_ranks_pack_what_one_rank_packs(fixed: bool) -> None:
    def made(share: Share) -> Loader:
        loader = Loader(some_examples(), tokens_per_step=300, micro_capacity=64, seed=7, share=share)
        if fixed:
            loader.fix(loader.capacities(2))
        return loader

    whole, parts = made(Share()), [made(Share(rank, 3)) for rank in range(3)]
    empty = 0
    for step, (packed, *others) in enumerate(zip(whole.epoch(1), *(part.epoch(1) for part in parts), strict=True)):
        for part, batches in zip(parts, others, strict=True):
            assert part.divisor(1, step) == whole.divisor(1, step) and part.counts(1, step) == whole.counts(1, step)
            for number, batch in zip(part.bins(1, step), batches, strict=True):
                if number < len(packed):
                    assert torch.equal(batch.tokens, packed[number].tokens)
                    assert torch.equal(batch.labels, packed[number].labels)
                else:
                    empty += 1
                    assert not batch.response_tokens and (batch.labels == -1).all()
                if fixed:
                    shape = [len(getattr(batch, name)) for name in ("tokens", "cu_seqlens", "rows", "labels")]
                    assert shape == [len(getattr(packed[0], n)) for n in ("tokens", "cu_seqlens", "rows", "labels")]
    assert empty


@pytest.mark.parametrize("loss", [CrossEntropy(), Anchored(0.3)], ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("fixed", [False, True])
def test_a_batch_of_nothing_adds_nothing(tiny_folder, loss, fixed: bool) -> None:
    ours = oracle.ours(tiny_folder("llama-shallow"), LoraConfig(rank=4), random_b=True)
    data = [Example(torch.randint(3, tiny.VOCAB, (n,)).tolist(), [i > 0 for i in range(n)], n) for n in (9, 20, 31)]
    layout, step = loss.layout(data), Step(ours.decoder, ours.arena, loss=loss)
    shape = capacities([[0, 1], [2]], [9, 20, 31], [8, 19, 30]) if fixed else None
    step.micro_step(pack(data[:2], layout=layout, shape=shape))
    before = ours.arena.grads.clone(), step.loss_sum.clone(), step.figure_sums.clone()
    step.micro_step(pack([], layout=layout, shape=shape))
    after = ours.arena.grads, step.loss_sum, step.figure_sums
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) and before[0].any()


def test_an_evaluation_is_the_same_to_the_last_bit(tiny_folder) -> None:
    ours = oracle.ours(tiny_folder("llama-shallow"), LoraConfig(rank=4), random_b=True)
    data = [Example(torch.randint(3, tiny.VOCAB, (n,)).tolist(), [i > 0 for i in range(n)], n) for n in range(5, 40)]
    want = evaluate(ours.decoder, data, capacity=64, loss=Anchored(0.3))
    parts: list[list[object]] = []
    for rank in range(3):
        evaluate(
            ours.decoder,
            data,
            capacity=64,
            loss=Anchored(0.3),
            share=Share(rank, 3),
            gather=lambda own: [parts.append(own) or own],
        )
    got = evaluate(ours.decoder, data, capacity=64, loss=Anchored(0.3), share=Share(0, 3), gather=lambda own: parts)
    assert got == want and want.figures["drift"] > 0


def test_weights_that_differ_are_noticed() -> None:
    said = torch.zeros(3, CONTROL_FLAGS)
    weights = torch.randn(3, 10_000)
    weights[1:] = weights[0]

    def report() -> list[list[float]]:
        tails = [Tail(torch.zeros(64), own, 0) for own in said]
        for tail, own in zip(tails, weights, strict=True):
            tail.fingerprint(own)
            tail.fill()
        total = sum(tail.summed_flags for tail in tails)
        found = torch.zeros(3, 2 * CONTROL_FLAGS)
        for tail, row in zip(tails, found, strict=True):
            tail.summed_flags.copy_(total)
            tail.report(row)
        return found.tolist()

    assert not any(signals(row, 3).differ or signals(row, 3).stop for row in report())
    assert said[0, 1:].max() > 0 and said.shape[1] == 1 + PIECES
    weights[2, 77] = torch.nextafter(weights[2, 77], torch.tensor(9.0))
    assert any(signals(row, 3).differ for row in report())
    said[1, 0] = 1.0
    assert all(signals(row, 3).stop for row in report())
