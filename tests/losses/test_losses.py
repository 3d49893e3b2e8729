"""Every loss against plain torch over PEFT's model: value, every gradient, figures; packed, padded and accumulated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graftune.batch import Example, Field, PackedBatch
from graftune.data.pack import Capacities, capacities, pack, plan_epoch
from graftune.errors import GraftuneError
from graftune.losses import Anchored, CrossEntropy, Loss, choose
from graftune.settings.sections import LoraConfig, TrainConfig
from graftune.step.evaluate import evaluate
from graftune.step.pipeline import BatchBuffer, BatchShape, HostPipeline
from graftune.step.step import Step
from tests.support import oracle, tiny
from tests.support.pairwise import pairwise
from tests.two_ways.test_accumulation import HYPER

Folder = Callable[[str], Path]
ANCHOR = 0.3


def examples(*lengths: int, weighted: bool = True) -> list[Example]:
    """Random tokens and weights; the last example has no weights of its own."""
    made = []
    for place, length in enumerate(lengths):
        tokens = torch.randint(3, tiny.VOCAB, (length,)).tolist()
        weights = (torch.rand(length) * 3).tolist() if weighted and place < len(lengths) - 1 else None
        made.append(Example(tokens, [i > 0 and i % (place % 3 + 1) == 0 for i in range(length)], place, weights))
    return made


def by_torch(ours: oracle.Ours, variant: str, data: list[Example], anchor: float) -> dict[str, Any]:
    """Sums and gradients by autograd over PEFT's model, a document at a time."""
    model = oracle.peft_model(tiny.hf_model(variant), ours).train()
    cross_entropy, drift, divisor = torch.zeros(()), torch.zeros(()), 0.0
    for example in data:
        tokens = torch.tensor([example.tokens])
        chosen = torch.tensor(example.supervised)[1:]
        labels, weights = (
            tokens[0, 1:][chosen],
            torch.tensor(example.weights or [1.0] * len(example.tokens))[1:][chosen],
        )
        log_p = model(tokens).logits[0, :-1][chosen].log_softmax(-1).gather(1, labels[:, None])[:, 0]
        with torch.no_grad(), model.disable_adapter():
            base = model(tokens).logits[0, :-1][chosen].log_softmax(-1).gather(1, labels[:, None])[:, 0]
        cross_entropy = cross_entropy - (weights * log_p).sum()
        drift = drift + (log_p - base).square().sum()
        divisor += float(weights.sum())
    total = cross_entropy + anchor * drift
    total.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    sums = {"loss": total, "cross_entropy": cross_entropy, "drift": drift}
    return {name: float(value.detach()) for name, value in sums.items()} | {"divisor": divisor, "grads": grads}


def packed(loss: Loss, data: list[Example], fixed: bool = False) -> PackedBatch:
    layout = loss.layout(data)
    if not fixed:
        return pack(data, layout=layout)
    held = capacities([range(len(data))], [len(e.tokens) for e in data], [e.response_tokens for e in data])
    return pack(data, layout=layout, shape=held)


def of(anchor: float) -> Loss:
    return Anchored(anchor) if anchor else CrossEntropy()


@pytest.mark.few(4)
@pairwise(
    ("variant", ["llama", "gemma2"]),  # gemma2 caps its logits
    ("anchor", [0.0, ANCHOR]),
    ("weighted", [False, True]),
    ("fixed", [False, True]),
)
def test_loss_and_gradients_are_autograds(
    variant: str, anchor: float, weighted: bool, fixed: bool, tiny_folder: Folder
) -> None:
    data = examples(20, 33, 5, weighted=weighted)
    ours = oracle.ours(tiny_folder(variant))
    loss = of(anchor)
    step = Step(ours.decoder, ours.arena, loss=loss, longest=128)
    batch = packed(loss, data, fixed)
    step.micro_step(batch)
    want = by_torch(ours, variant, data, anchor)
    assert batch.divisor == pytest.approx(want["divisor"]) and ("weights" in batch.extra) == weighted
    assert float(step.loss_sum) == pytest.approx(want["loss"], rel=1e-5)
    if anchor:
        assert want["drift"] > 1, "adapters that hardly move the base prove little"
        assert step.figure_sums.tolist() == pytest.approx([want["cross_entropy"], want["drift"]], rel=1e-5)
    for name in ours.arena.slots:
        grad, theirs = ours.arena.view(name, ours.arena.grads), want["grads"][oracle.peft_name(name)]
        assert theirs.norm() > 1e-4 and (grad - theirs).norm() / theirs.norm() < 2e-5, name


@pytest.mark.parametrize("anchor", [0.0, ANCHOR], ids=["cross_entropy", "anchored"])
@pytest.mark.parametrize("division", [[[0], [1], [2], [3]], [[3, 1], [0, 2]]], ids=["one each", "pairs"])
def test_micro_batches_equal_one_batch(division: list[list[int]], anchor: float, tiny_folder: Folder) -> None:
    """Loss, figures, norm and gradients: the divisor is the sum of weights of the whole step."""
    folder, data, found = tiny_folder("llama"), examples(30, 3, 17, 8), []  # making a folder draws numbers, too
    for bins in ([[0, 1, 2, 3]], division):
        torch.manual_seed(5)
        ours, loss = oracle.ours(folder), of(anchor)
        step = Step(ours.decoder, ours.arena, loss=loss)
        loop = HostPipeline(step)
        batches = [packed(loss, [data[i] for i in held]) for held in bins]
        hyper = HYPER | {"divisor": sum(batch.divisor for batch in batches), "clip": 0.5}
        loop.step([loop.stage(batch) for batch in batches], hyper, range(len(batches)))
        (figures,) = loop.finished()
        found.append((figures, ours.arena.weights.clone()))
    (whole, weights), (parts, weights_) = found
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5) and parts.grad_norm == pytest.approx(
        whole.grad_norm, rel=1e-4
    )
    assert parts.more == pytest.approx(whole.more, rel=1e-5) and set(whole.more) == set(loss.figures)
    assert torch.allclose(weights, weights_, atol=1e-3) and not whole.skipped
    if anchor:
        assert whole.loss == pytest.approx(whole.more["cross_entropy"] + anchor * whole.more["drift"], rel=1e-5)
    assert not step.figure_sums.any(), "the next step starts from nothing"


@pytest.mark.parametrize("anchor", [0.0, ANCHOR], ids=["cross_entropy", "anchored"])
def test_evaluation_reports_the_losss_figures(anchor: float, tiny_folder: Folder) -> None:
    data, ours = examples(20, 33, 5), oracle.ours(tiny_folder("llama"))
    want = by_torch(ours, "llama", data, anchor)
    for capacity in (33, 1000):
        got = evaluate(ours.decoder, data, capacity=capacity, loss=of(anchor))
        assert got.loss == pytest.approx(want["loss"] / want["divisor"], rel=1e-5)
        assert got.perplexity == pytest.approx(math.exp(want["cross_entropy"] / want["divisor"]), rel=1e-4)
        assert got.response_tokens == sum(e.response_tokens for e in data) and got.examples == 3
        names = ("cross_entropy", "drift") if anchor else ()
        assert got.figures == {name: pytest.approx(want[name] / want["divisor"], rel=1e-5) for name in names}
        assert got.document() == {**{n: getattr(got, n) for n in ("loss", "perplexity", "response_tokens", "examples")},
                                  **got.figures}  # fmt: skip
    base = evaluate(ours.decoder, data, capacity=1000, loss=of(anchor), adapted=False)
    assert base.figures.get("drift", 0.0) == 0 and base.loss != pytest.approx(got.loss, rel=1e-3)


def test_dropout_leaves_the_bases_predictions_alone(tiny_folder: Folder) -> None:
    """Only the pass that trains drops anything: with adapters that are still zero nothing has moved."""
    ours = oracle.ours(tiny_folder("llama"), LoraConfig(rank=4, dropout=0.5), random_b=False)
    loss = Anchored(ANCHOR)
    step = Step(ours.decoder, ours.arena, dropout=0.5, loss=loss)
    step.micro_step(packed(loss, examples(20, 9)))
    cross_entropy, drift = step.figure_sums.tolist()
    assert drift < 1e-8 and cross_entropy > 1
    step.discard()
    assert not step.figure_sums.any()


def test_a_batch_travels_with_the_losss_fields() -> None:
    """Everything in one flat buffer and out again; a batch without fields takes no more than it did."""
    data = examples(7, 12, 5)
    layout = dataclasses.replace(
        CrossEntropy().layout(data),
        fields=(
            *CrossEntropy().layout(data).fields,
            Field("document", torch.int32, lambda held: torch.arange(sum(len(e.tokens) for e in held)).numpy()),
            Field("chosen", torch.int64, lambda held: torch.arange(len(held)).numpy() + 5, per="document", padding=-1),
        ),
    )
    batch = pack(data, layout=layout, shape=Capacities(64, 6, 33, 64))
    flat = BatchBuffer(BatchShape.of(batch))
    host = torch.full((flat.size,), -7)
    flat.fill(host, batch)
    own, extra = flat.views(host.clone())
    for name, value in own.items():
        assert torch.equal(value, getattr(batch, name)) and value.dtype == getattr(batch, name).dtype
    assert set(extra) == {"weights", "document", "chosen"}
    assert all(torch.equal(extra[name], batch.extra[name]) for name in extra)
    assert extra["chosen"].tolist() == [5, 6, 7, -1, -1, -1] and extra["weights"].dtype == torch.float32
    targets = (batch.labels >= 0).sum()
    assert extra["document"][:targets].tolist() == (batch.rows[:targets] + 1).tolist(), "of the label, not of its row"
    plain = BatchShape.of(pack(data, shape=Capacities(64, 6, 33, 64)))
    assert BatchBuffer(plain).size == 2 * 64 + 2 * 33 + 4


def test_groups_stay_together_in_their_order() -> None:
    lengths = torch.randint(1, 30, (61,)).tolist()
    groups = torch.arange(61).numpy() // 2
    plan = plan_epoch(lengths, tokens_per_step=200, micro_capacity=100, seed=3, epoch=1, groups=groups)
    bins = [held for step in plan for held in step]
    assert sorted(i for held in bins for i in held) == list(range(61))
    for held in bins:
        assert sum(lengths[i] for i in held) <= 100
        for place, index in enumerate(held):
            if index % 2:
                assert held[place - 1] == index - 1, "the first of its pair stands before it"
    flat = [i for held in bins for i in held if not i % 2]
    assert flat != sorted(flat), "groups are shuffled"
    with pytest.raises(AssertionError, match="exceeds a bin"):
        plan_epoch([60, 60], tokens_per_step=200, micro_capacity=100, seed=0, epoch=0, groups=groups[:2])
    alone = plan_epoch(lengths, tokens_per_step=200, micro_capacity=100, seed=3, epoch=1)
    ones = plan_epoch(
        lengths, tokens_per_step=200, micro_capacity=100, seed=3, epoch=1, groups=torch.arange(61).numpy()
    )
    assert alone == ones, "groups of one are no groups"


def test_a_loss_that_cannot_work_is_refused_in_one_sentence() -> None:
    assert isinstance(choose(TrainConfig()), CrossEntropy)
    made = choose(TrainConfig(loss="anchored", anchor=0.5))
    assert isinstance(made, Anchored) and made.anchor == 0.5
    for method in ("full", "scratch"):
        with pytest.raises(GraftuneError, match=f"loss is anchored and method is {method}"):
            choose(TrainConfig(loss="anchored", method=method))  # type: ignore[arg-type]
    with pytest.raises(GraftuneError, match="anchor is set and loss is cross_entropy"):
        choose(TrainConfig(anchor=0.5))
