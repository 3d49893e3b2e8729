"""Policy losses against TRL's results (sampled.py), whole and divided; a temperature of the logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from graftune.batch import Example
from graftune.data.pack import pack
from graftune.errors import GraftuneError
from graftune.losses import CrossEntropy, Loss, choose
from graftune.settings.sections import TrainConfig
from graftune.step.evaluate import evaluate
from graftune.step.step import Step
from tests.losses import preferred, sampled
from tests.losses.test_preferences import stepped
from tests.support import oracle, tiny

Model = Callable[[str], oracle.Ours]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return cache(lambda family: preferred.ours_of(family, tmp_path_factory.mktemp("sampled") / family))


def loss_of(name: str) -> Loss:
    return choose(TrainConfig(**sampled.CASES[name]))


@pytest.mark.parametrize("name", sampled.CASES)
@pytest.mark.parametrize(("family", "capacity", "fixed"), [("llama-shallow", 1000, False), ("qwen3", 30, True)])
def test_losses_are_trls(name: str, family: str, capacity: int, fixed: bool, model: Model) -> None:
    """Packed in one batch; and in several of a fixed shape, with rows and documents of padding."""
    loss, want = loss_of(name), sampled.stored()[family][name]
    got = stepped(model(family), loss, sampled.answers(), capacity, fixed)
    assert (got["micro"] > 1) == fixed
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    for figure, value in want["figures"].items():
        assert got["figures"].get(figure, 0.0) == pytest.approx(value, rel=1e-5, abs=1e-6), figure
    grads = preferred.grads_of(family, name, sampled.GRADS)
    assert set(grads) == set(got["grads"])
    for slot, grad in grads.items():
        largest = float(grad.abs().max())
        assert largest > 1e-6 and float((got["grads"][slot] - grad).abs().max()) <= 1e-5 * largest, slot


@pytest.mark.parametrize("name", ["grpo, sequence", "dapo, kl"])
def test_an_evaluation_agrees(name: str, model: Model) -> None:
    ours, loss, data = model("qwen3"), loss_of(name), sampled.answers()
    step, found = stepped(ours, loss, data, 1000, False), evaluate(ours.decoder, data, capacity=30, loss=loss)
    assert found.loss == pytest.approx(step["loss"], rel=1e-5) and found.perplexity is None
    assert found.figures == pytest.approx(step["figures"], rel=1e-5)


class Heated(CrossEntropy):
    temperature = 1.7


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_temperature_divides_the_logits(family: str, tiny_folder: Callable[[str], Path]) -> None:
    """Also where a family soft-caps them; in the loss and in every gradient."""
    ours = oracle.ours(tiny_folder(family))
    data = sampled.answers(3)
    step = Step(ours.decoder, ours.arena, loss=Heated())
    step.micro_step(pack(data))
    model = oracle.peft_model(tiny.load_hf(tiny_folder(family)), ours).train()
    total = torch.zeros(())
    for example in data:
        ids, on = torch.tensor([example.tokens]), torch.tensor(example.supervised[1:])
        log_p = (model(ids).logits[0, :-1] / 1.7).log_softmax(-1).gather(1, ids[0, 1:, None])
        total = total - log_p[on].sum()
    total.backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    assert float(step.loss_sum) == pytest.approx(float(total.detach()), rel=1e-5)
    for slot in ours.arena.slots:
        grad, want = ours.arena.view(slot, ours.arena.grads), theirs[oracle.peft_name(slot)]
        assert want is not None and (grad - want).norm() < 2e-5 * want.norm() > 0, slot


def test_what_is_missing_is_named() -> None:
    loss = choose(TrainConfig(loss="ppo"))
    one, two = sampled.answers(2)
    with pytest.raises(GraftuneError, match="example 2 has no advantages, which Ppo reads"):
        loss.layout([one, Example(two.tokens, two.supervised, numbers={"logprobs": 0.0})])
    with pytest.raises(GraftuneError, match="examples have weights, which Ppo does not read"):
        loss.layout([Example(one.tokens, one.supervised, weights=[2.0] * len(one.tokens), numbers=one.numbers)])
    assert choose(TrainConfig(loss="cispo")).clip_high == 4 and math.isclose(loss.clip_high, 0.28)  # type: ignore[attr-defined]
