"""Packing: every example once, no bin too full, and rows and labels as a plain loop would give them."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graftune.batch import PLAIN, Example, PackedBatch
from graftune.data.loader import Loader
from graftune.data.pack import TILE, Capacities, ahead_capacities, bins_within, capacities, pack, plan_epoch

examples_of = st.lists(
    st.lists(st.tuples(st.integers(1, 99), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=12
).map(lambda docs: [Example([t for t, _ in doc], [on for _, on in doc], i) for i, doc in enumerate(docs)])


def naive(examples: list[Example]) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    tokens: list[int] = []
    positions: list[int] = []
    bounds = [0]
    rows: list[int] = []
    labels: list[int] = []
    for example in examples:
        for place, token in enumerate(example.tokens):
            if place > 0 and example.supervised[place]:
                rows.append(len(tokens) - 1)
                labels.append(token)
            positions.append(place)
            tokens.append(token)
        bounds.append(len(tokens))
    return tokens, positions, bounds, rows, labels


@settings(max_examples=60, deadline=None)
@given(examples=examples_of)
def test_exact_packing(examples: list[Example]) -> None:
    batch = pack(examples)
    found = (batch.tokens, batch.positions, batch.cu_seqlens, batch.rows, batch.labels)
    assert tuple(tensor.tolist() for tensor in found) == naive(examples)
    assert [tensor.dtype for tensor in found] == [torch.int64, torch.int64, torch.int32, torch.int64, torch.int64]
    assert batch.lengths == tuple(len(e.tokens) for e in examples)
    assert batch.response_tokens == sum(e.response_tokens for e in examples) == len(batch.rows)


@settings(max_examples=60, deadline=None)
@given(
    examples=examples_of,
    spare=st.integers(0, 60),
    more=st.integers(0, 9),
    docs=st.integers(0, 4),
    rows=st.integers(0, 5),
)
def test_padding_is_cut_into_documents_within_the_bound(
    examples: list[Example], spare: int, more: int, docs: int, rows: int
) -> None:
    exact = pack(examples)
    total, real = len(exact.tokens), len(examples)
    longest = max(exact.lengths) + more
    padding = -(-spare // longest)
    answers = exact.response_tokens
    limits = Capacities(total + spare, real + padding + docs, answers + rows, longest)
    batch = pack(examples, shape=limits)
    assert max(batch.lengths) <= longest and len(batch.lengths) == real + padding + docs
    assert batch.lengths[:real] == exact.lengths and sum(batch.lengths) == total + spare
    assert all(batch.lengths[: real + padding]) and not any(batch.lengths[real + padding :])
    assert batch.cu_seqlens.tolist()[0] == 0 and batch.cu_seqlens.diff().tolist() == list(batch.lengths)
    assert batch.positions.tolist() == [place for length in batch.lengths for place in range(length)]
    assert batch.tokens[:total].equal(exact.tokens) and not batch.tokens[total:].any()
    assert batch.rows[:answers].equal(exact.rows) and batch.labels[:answers].equal(exact.labels)
    assert batch.rows[answers:].tolist() == [0] * rows and batch.labels[answers:].tolist() == [-1] * rows
    assert batch.response_tokens == answers
    if padding:
        with pytest.raises(AssertionError, match="more documents"):
            pack(examples, shape=limits._replace(max_docs=real + padding - 1))
    with pytest.raises(AssertionError, match="longer than its bound"):
        pack(examples, shape=limits._replace(max_docs=real + total + spare, longest=max(exact.lengths) - 1))


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=60),
    capacity=st.integers(200, 600),
    seed=st.integers(0, 99),
)
def test_capacities_hold_every_bin_and_no_more(sizes: list[int], capacity: int, seed: int) -> None:
    rng = random.Random(seed)
    examples = [Example([1] * n, [rng.random() < 0.4 for _ in range(n)]) for n in sizes]
    responses = [example.response_tokens for example in examples]
    plan = plan_epoch(sizes, tokens_per_step=2 * capacity, micro_capacity=capacity, seed=seed, epoch=0)
    bins = [held for step in plan for held in step]
    limits = capacities(bins, sizes, responses)
    batches = [pack([examples[i] for i in held], shape=limits) for held in bins]
    shapes = {(len(b.tokens), len(b.cu_seqlens) - 1, len(b.rows)) for b in batches}
    assert shapes == {limits[:3]}
    assert max(max(b.lengths) for b in batches) <= limits.longest <= limits.capacity
    assert not any(size % TILE for size in (limits.capacity, limits.max_rows, limits.longest))
    # The least: a tile less of anything would not do, nor would a document less.
    assert max(sum(sizes[i] for i in held) for held in bins) > limits.capacity - TILE
    assert max(1, *(b.response_tokens for b in batches)) > limits.max_rows - TILE
    assert max(sizes) > limits.longest - TILE
    assert max(sum(length > 0 for length in b.lengths) for b in batches) == limits.max_docs


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=300),
    capacity=st.integers(40, 100),
    bins=st.integers(1, 5),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 5),
)
def test_plan(lengths: list[int], capacity: int, bins: int, seed: int, epoch: int) -> None:
    def planned(**other: Any) -> list[list[list[int]]]:
        settings = {
            "tokens_per_step": capacity * bins - capacity // 3,
            "micro_capacity": capacity,
            "seed": seed,
            "epoch": epoch,
        }
        return plan_epoch(lengths, **{**settings, **other})

    plan = planned()
    held = [bin for step in plan for bin in step]
    assert sorted(i for bin in held for i in bin) == list(range(len(lengths)))
    assert all(bin and sum(lengths[i] for i in bin) <= capacity for bin in held)
    assert all(1 <= len(step) <= bins for step in plan)
    totals = [sum(lengths[i] for bin in step for i in bin) for step in plan]
    limit = capacity * bins - capacity // 3
    assert all(total <= limit or sum(map(len, step)) == 1 for total, step in zip(totals, plan, strict=True))
    assert planned() == plan
    if len(lengths) > 30:
        assert planned(epoch=epoch + 1) != plan and planned(seed=seed + 1) != plan
    # A step is left half empty only where nothing that was waiting would have gone in: few steps are wasted.
    assert len(plan) <= 3 * sum(lengths) / limit + bins + 1


def test_plan_is_tight_on_ordinary_lengths() -> None:
    rng = random.Random(0)
    lengths = [min(512, int(rng.lognormvariate(4.5, 0.7)) + 5) for _ in range(5000)]
    held = [
        bin for step in plan_epoch(lengths, tokens_per_step=4096, micro_capacity=2048, seed=1, epoch=0) for bin in step
    ]
    assert sum(lengths) / (len(held) * 2048) > 0.97


@pytest.mark.parametrize("capacity", [512, 1100, 3000, 4096, 8192])
def test_a_step_holds_the_tokens_asked_for_whatever_a_micro_batch_holds(capacity: int) -> None:
    rng = random.Random(0)
    lengths = [rng.randint(20, 120) for _ in range(2000)]
    plan = plan_epoch(lengths, tokens_per_step=4096, micro_capacity=capacity, seed=1, epoch=0)
    totals = [sum(lengths[i] for bin in step for i in bin) for step in plan]
    assert max(totals) <= 4096 and min(totals[:-1]) > 0.95 * 4096


def test_a_step_smaller_than_a_bin_has_one_and_long_examples_are_the_callers_mistake() -> None:
    assert plan_epoch([3, 3], tokens_per_step=2, micro_capacity=4, seed=0, epoch=0) in ([[[0]], [[1]]], [[[1]], [[0]]])
    with pytest.raises(AssertionError, match="exceeds a bin"):
        plan_epoch([5], tokens_per_step=8, micro_capacity=4, seed=0, epoch=0)
    assert plan_epoch([], tokens_per_step=8, micro_capacity=4, seed=0, epoch=0) == []


def some_examples(count: int = 60) -> list[Example]:
    rng = random.Random(3)
    sizes = [rng.randint(2, 30) for _ in range(count)]
    return [
        Example([i + 1] * n, [False] + [rng.random() < 0.5 for _ in range(n - 2)] + [True], i)
        for i, n in enumerate(sizes)
    ]


def same(left: PackedBatch, right: PackedBatch) -> bool:
    names = ("tokens", "positions", "cu_seqlens", "rows", "labels")
    return all(getattr(left, name).equal(getattr(right, name)) for name in names) and left.lengths == right.lengths


@pytest.mark.parametrize("fixed", [False, True])
def test_loader_resumes_by_epoch_and_step(fixed: bool) -> None:
    def make() -> Loader:
        loader = Loader(some_examples(), tokens_per_step=128, micro_capacity=64, seed=7)
        if fixed:
            loader.fix(loader.capacities(3))
        return loader

    straight = list(make().epoch(1))
    assert len(straight) == make().steps_per_epoch(1)
    for start in (0, 1, len(straight) - 1, len(straight)):
        resumed = list(make().epoch(1, start))
        assert len(resumed) == len(straight) - start
        for left, right in zip(straight[start:], resumed, strict=True):
            assert all(same(a, b) for a, b in zip(left, right, strict=True))
    seen = sorted({int(token) - 1 for step in straight for batch in step for token in batch.tokens if token})
    assert seen == list(range(60))


@pytest.mark.parametrize("fixed", [False, True])
def test_a_steps_counts_leave_padding_out(fixed: bool) -> None:
    loader = Loader(some_examples(), tokens_per_step=128, micro_capacity=64, seed=7)
    if fixed:
        loader.fix(loader.capacities(2))
    exact = Loader(some_examples(), tokens_per_step=128, micro_capacity=64, seed=7)
    for number, (step, plain) in enumerate(zip(loader.epoch(1), exact.epoch(1), strict=True)):
        tokens, responses = loader.counts(1, number)
        assert tokens == sum(len(b.tokens) for b in plain)
        assert responses == sum(b.response_tokens for b in step) == sum(b.response_tokens for b in plain)
        assert not fixed or {len(b.tokens) for b in step} == {loader.capacities(2).capacity}


def test_errors_in_the_packing_thread_surface_and_no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(some_examples(), tokens_per_step=64, micro_capacity=64, seed=7)
    before = threading.active_count()
    steps = loader.epoch(0)
    next(steps)
    assert threading.active_count() == before + 1
    steps.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    calls = []

    def failing(*args: Any, **kwargs: Any) -> PackedBatch:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("packing failed")
        return pack(*args, **kwargs)

    monkeypatch.setattr("graftune.data.pack.pack", failing)
    steps = loader.epoch(0)
    assert next(steps) and next(steps)
    with pytest.raises(RuntimeError, match="packing failed"):
        next(steps)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("step", "capacity", "plan"),
    [(4096, 2048, "171a4ad48d8dd461"), (4096, 4096, "42ba7e130df9a19b"), (1000, 600, "0ef189e40b9ba00e")],
)
def test_plans_do_not_change_from_version_to_version(step: int, capacity: int, plan: str) -> None:
    """Pinned: a run finds its place by planning its epochs again."""
    rng = random.Random(5)
    lengths = [min(512, int(rng.lognormvariate(4.5, 0.7)) + 5) for _ in range(3000)]
    for given_as in (lengths, np.array(lengths)):
        made = plan_epoch(given_as, tokens_per_step=step, micro_capacity=capacity, seed=7, epoch=2)
        assert hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16] == plan


def test_bins_within_a_shape_can_be_packed_in_it() -> None:
    """Tokens, documents and rows are bounded, with the documents that padding makes."""
    draw = np.random.default_rng(4)
    shape = ahead_capacities(Capacities(128, 6, 64, 64), longest=100)
    assert shape == Capacities(128, 7, 64, 128)
    for longest in (3, 20, 100):
        made = []
        for size in draw.integers(2, longest + 1, 60).tolist():
            trained = int(draw.integers(1, min(size, 64)))
            made.append(Example([5] * size, [False] * (size - trained) + [True] * trained))
        bins = bins_within(made, shape, PLAIN)
        assert [index for held in bins for index in held] == list(range(60)) and all(bins)
        for held in bins:
            assert len(pack([made[i] for i in held], shape=shape).tokens) == 128
        for held, after in itertools.pairwise(bins):
            more = [made[i] for i in (*held, after[0])]
            tokens, rows = sum(len(e.tokens) for e in more), sum(e.response_tokens for e in more)
            assert tokens > 128 or rows > 64 or len(more) > shape.real_docs, "the next one does not fit"


def test_the_examples_that_a_short_run_reads() -> None:
    data = [Example([5] * 10, [False] * 5 + [True] * 5) for _ in range(20)]
    loader = Loader(data, tokens_per_step=40, micro_capacity=20, seed=3)
    first = sorted(i for step in loader.plan(0)[:2] for held in step for i in held)
    assert loader.used(2) == first and len(first) == 8
    assert loader.used(5) == loader.used(9) == list(range(20)) and loader.used(0) == []
