"""The room for preference losses: DPO written as docs/extending.md says (pairs.py), and nothing else changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from benchmarks.synthetic import dataset_of

from graftune.batch import Example
from graftune.data.loader import Loader
from graftune.errors import GraftuneError
from graftune.losses import CrossEntropy
from graftune.model.arena import Start
from graftune.settings.sections import LoraConfig
from graftune.step.evaluate import evaluate
from graftune.step.step import Step
from tests.losses.pairs import BETA, PAIRS, Dpo, pairs
from tests.support import oracle, tiny


@pytest.mark.few(1)
@pytest.mark.parametrize(("reference", "fixed"), [("base", True), ("start", False)])
def test_dpo_is_one_class(reference: Literal["base", "start"], fixed: bool, tiny_folder: Callable[[str], Path]) -> None:
    """Loss, accuracy and every gradient over several micro-batches, against autograd over PEFT's model. The start is an
    adapter that is none of the base's, and what trains has moved since; its norms too."""
    lora = LoraConfig(rank=4, alpha=10.0, train_norms=reference == "start")
    data, ours, loss = pairs(7), oracle.ours(tiny_folder("llama"), lora), Dpo(reference)
    start, before = Start(ours.arena), oracle.peft_model(tiny.hf_model("llama"), ours)
    start.take()
    known = [name for name in ours.arena.slots if name != "norm.weight"]  # which PEFT leaves alone
    for name in known:
        ours.arena.view(name, ours.arena.weights).add_(0.05 * torch.randn(ours.arena.slots[name].shape))
    ours.arena.publish()
    step = Step(ours.decoder, ours.arena, loss=loss, longest=64, start=start)
    loader = Loader(data, tokens_per_step=1000, micro_capacity=64, seed=3, layout=loss.layout(data))
    if fixed:
        loader.fix(loader.capacities(1))
    (micro_batches,) = loader.epoch(0)
    assert len(micro_batches) > 2 and loader.divisor(0, 0) == 7 == sum(batch.divisor for batch in micro_batches)
    for batch in micro_batches:
        step.micro_step(batch)

    model = oracle.peft_model(tiny.hf_model("llama"), ours).train()

    def sum_of(example: Example, model: torch.nn.Module = model) -> torch.Tensor:
        tokens = torch.tensor([example.tokens])
        log_probs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        return log_probs[torch.tensor(example.supervised[1:])].sum()

    def compared(example: Example) -> torch.Tensor:
        if reference == "start":
            return sum_of(example, before)
        with model.disable_adapter():
            return sum_of(example)

    def moved(example: Example) -> torch.Tensor:
        with torch.no_grad():
            base = compared(example)
        return sum_of(example) - base

    margins = torch.stack([BETA * (moved(data[i]) - moved(data[i + 1])) - 0.05 * i for i in range(0, 14, 2)])
    want = -F.logsigmoid(margins).sum()
    want.backward()
    assert float(step.loss_sum) == pytest.approx(float(want.detach()), rel=1e-5)
    assert step.figure_sums.tolist() == [float((margins > 0).sum())]
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name in known:
        grad, other = ours.arena.view(name, ours.arena.grads), theirs[oracle.peft_name(name)]
        assert other.norm() > 1e-4 and (grad - other).norm() / other.norm() < 2e-5, name
    found = evaluate(ours.decoder, data, capacity=60, loss=loss, start=start)
    assert found.loss == pytest.approx(float(want.detach()) / 7, rel=1e-5) and found.perplexity is None
    assert found.figures == {"accuracy": pytest.approx(float((margins > 0).float().mean()))}


def test_groups_are_the_datas(tiny_folder: Callable[[str], Path]) -> None:
    """Not every second example: pairs follow each other in any order of the data, and a broken one is refused."""
    data, loss = pairs(5), Dpo()
    shuffled = [data[2 * pair + member] for pair in (3, 0, 4, 1, 2) for member in (0, 1)]
    loader = Loader(shuffled, tokens_per_step=99, micro_capacity=50, seed=1, layout=loss.layout(shuffled))
    held = [[shuffled[index].group for index in bin] for step in loader.plan(0) for bin in step]
    assert sorted(group for bin in held for group in bin) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert all(bin[::2] == bin[1::2] for bin in held), "no pair is divided"
    alone = dataclasses.replace(data[4], group=-1)
    for broken in (data[:9], data[1:], [data[0], data[2], data[1], data[3]], [*data[:4], alone, data[5]]):
        with pytest.raises(GraftuneError, match="are not whole groups"):
            loss.layout(broken)


def test_a_loss_takes_its_own_kind() -> None:
    """Cross-entropy would train on rejected answers."""
    data = pairs(3)
    stored, answers = dataset_of(data, kind=PAIRS), dataset_of([Example([1, 2], [False, True])])
    assert stored.kind == "pairs of answers" and len(Dpo().layout(stored.examples).fields) == 3
    with pytest.raises(GraftuneError, match="CrossEntropy takes answers, and this data holds pairs of answers"):
        CrossEntropy().layout(stored.examples)
    with pytest.raises(GraftuneError, match="Dpo takes pairs of answers, and this data holds answers"):
        Dpo().layout(answers.examples)
