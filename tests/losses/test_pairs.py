"""Preference losses fit the interface: DPO written as docs/extending.md says, in one class and nothing else changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from graftune.batch import BatchLayout, Example, Field, PackedBatch
from graftune.data.encoded import lengths_of
from graftune.data.loader import Loader
from graftune.losses import LogProbLoss
from graftune.step.evaluate import evaluate
from graftune.step.step import Step
from tests import oracle, tiny

BETA = 0.4


def document_of_each_token(held: Sequence[Example]) -> np.ndarray:
    return np.repeat(np.arange(len(held)), lengths_of(held))


class Dpo(LogProbLoss):
    """Examples come in pairs, the chosen answer first. -log sigmoid(beta (moved(chosen) - moved(rejected)))."""

    figures = ("accuracy",)
    needs_base = True

    def layout(self, examples: Sequence[Example]) -> BatchLayout:
        return BatchLayout(
            fields=(
                Field("document", torch.int64, document_of_each_token),
                Field("real", torch.float32, lambda held: np.ones(len(held)), per="document"),
            ),
            shares=lambda held: np.full(len(held), 0.5),
            groups=lambda held: np.arange(len(held)) // 2,
        )

    def of_log_probs(
        self, log_probs: torch.Tensor, base: torch.Tensor | None, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert base is not None
        documents = 2 * (len(batch.extra["real"]) // 2)
        real, document = batch.extra["real"][:documents:2], batch.extra["document"]
        moved = log_probs.new_zeros(documents).index_add_(0, document, log_probs - base)
        margins = BETA * (moved[0::2] - moved[1::2])
        slope = -BETA * real * torch.sigmoid(-margins)
        slopes = torch.stack((slope, -slope), 1).flatten().index_select(0, document)
        return (real * F.softplus(-margins)).sum(), slopes, (real * (margins > 0)).sum().unsqueeze(0)


def pairs(count: int) -> list[Example]:
    made = []
    for _ in range(count):
        prompt = torch.randint(3, tiny.VOCAB, (4,)).tolist()
        for length in torch.randint(2, 12, (2,)).tolist():
            tokens = prompt + torch.randint(3, tiny.VOCAB, (length,)).tolist()
            made.append(Example(tokens, [False] * 4 + [True] * length))
    return made


@pytest.mark.parametrize("fixed", [False, True], ids=["exact", "padded"])
def test_dpo_is_one_class(fixed: bool, tiny_folder: Callable[[str], Path]) -> None:
    """Loss, accuracy and every gradient over several micro-batches, against autograd over PEFT's model."""
    data, ours, loss = pairs(7), oracle.ours(tiny_folder("llama")), Dpo()
    step = Step(ours.decoder, ours.arena, loss=loss, longest=64)
    loader = Loader(
        data, tokens_per_step=1000, micro_capacity=64, seed=3, fixed=fixed, layout=loss.layout(data)
    )  # fmt: skip
    if fixed:
        loader.capacities(1)
    (micro_batches,) = loader.epoch(0)
    assert len(micro_batches) > 2 and loader.divisor(0, 0) == 7 == sum(batch.divisor for batch in micro_batches)
    for batch in micro_batches:
        step.micro_step(batch)

    model = oracle.peft_model(tiny.hf_model("llama"), ours).train()

    def sum_of(example: Example) -> torch.Tensor:
        tokens = torch.tensor([example.tokens])
        log_probs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        return log_probs[torch.tensor(example.supervised[1:])].sum()

    def moved(example: Example) -> torch.Tensor:
        with torch.no_grad(), model.disable_adapter():
            base = sum_of(example)
        return sum_of(example) - base

    margins = torch.stack([BETA * (moved(data[i]) - moved(data[i + 1])) for i in range(0, 14, 2)])
    want = -F.logsigmoid(margins).sum()
    want.backward()
    assert float(step.loss_sum) == pytest.approx(float(want.detach()), rel=1e-5)
    assert step.figure_sums.tolist() == [float((margins > 0).sum())]
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name in ours.arena.slots:
        grad, other = ours.arena.view(name, ours.arena.grads), theirs[oracle.peft_name(name)]
        assert other.norm() > 1e-4 and (grad - other).norm() / other.norm() < 2e-5, name
    found = evaluate(ours.decoder, data, capacity=60, loss=loss)
    assert found.loss == pytest.approx(float(want.detach()) / 7, rel=1e-5) and found.perplexity is None
    assert found.figures == {"accuracy": pytest.approx(float((margins > 0).float().mean()))}
