"""Preference losses against TRL's results (preferred.py): loss, figures and every LoRA gradient; whole and divided."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, get_args

import pytest
import torch

from graftune.batch import Example
from graftune.data.loader import Loader
from graftune.errors import GraftuneError
from graftune.losses import LOSSES, Loss, choose
from graftune.losses.answers import Answers
from graftune.losses.kto import longest_mismatched, mismatched
from graftune.losses.preference import Orpo
from graftune.settings import auto
from graftune.settings.config import Config
from graftune.settings.sections import LOSS_SETTINGS, LossName, TrainConfig
from graftune.step.evaluate import evaluate
from graftune.step.pipeline import HostPipeline
from graftune.step.step import Step
from tests.losses import preferred
from tests.support import oracle
from tests.two_ways.test_accumulation import HYPER

Model = Callable[[str], oracle.Ours]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return cache(lambda family: preferred.ours_of(family, tmp_path_factory.mktemp("preferred") / family))


def loss_of(name: str) -> Loss:
    return choose(TrainConfig(**preferred.settings(name)))


def stepped(ours: oracle.Ours, loss: Loss, data: list[Example], capacity: int, fixed: bool) -> dict[str, Any]:
    """One optimizer step without its update: means and gradients."""
    layout = loss.layout(data)
    loader = Loader(data, tokens_per_step=10_000, micro_capacity=capacity, seed=3, layout=layout)
    if fixed:
        loader.fix(loader.capacities(1))
    step = Step(ours.decoder, ours.arena, loss=loss, longest=loader.shape.longest if loader.shape else None)
    (micro_batches,) = loader.epoch(0)
    pipeline = HostPipeline(step)
    for batch in micro_batches:
        pipeline.micro(pipeline.stage(batch), 0)
    divisor, arena = loader.divisor(0, 0), ours.arena
    found = {
        "micro": len(micro_batches),
        "loss": float(step.loss_sum) / divisor,
        "figures": dict(zip(loss.figures, loss.means(step.figure_sums, divisor).tolist(), strict=True)),
        "grads": {name: arena.view(name, arena.grads).clone() / divisor for name in arena.slots},
    }
    step.discard()
    return found


@pytest.mark.parametrize("name", preferred.CASES)
@pytest.mark.parametrize(("family", "capacity", "fixed"), [("llama-shallow", 1000, False), ("qwen3", 60, True)])
def test_losses_are_trls(name: str, family: str, capacity: int, fixed: bool, model: Model) -> None:
    """Packed in one batch; and in several of a fixed shape, some with pairs of padding. TRL packs nothing."""
    loss, data, want = loss_of(name), preferred.data_of(name), preferred.stored()[family][name]
    got = stepped(model(family), loss, data, capacity, fixed)
    assert (got["micro"] > 1) == fixed
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert set(want["figures"]) - {"kl"} <= set(loss.figures)
    for figure in set(want["figures"]) & set(loss.figures):
        value = want["figures"][figure]
        assert got["figures"][figure] == pytest.approx(value, rel=1e-5, abs=1e-6), figure
    if "prefers" in got["figures"]:  # SimPO's reward is the mean log p per token
        assert got["figures"]["prefers"] == pytest.approx(preferred.stored()[family]["simpo"]["figures"]["accuracy"])
    grads = preferred.grads_of(family, name)
    assert set(grads) == set(got["grads"])
    for slot, grad in grads.items():
        largest = float(grad.abs().max())
        assert largest > 1e-6 and float((got["grads"][slot] - grad).abs().max()) <= 2e-5 * largest, slot


@pytest.mark.parametrize("name", ["dpo, sft", "kto"])
def test_a_step_is_the_same_twice_and_an_evaluation_agrees(
    name: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit; and an evaluation in small batches has the loss and figures of a step over the same data."""
    ours, loss, data = model("qwen3"), loss_of(name), preferred.data_of(name)
    first, second = (stepped(ours, loss, data, 45, True) for _ in range(2))
    assert first["loss"] == second["loss"] and first["figures"] == second["figures"]
    assert all(torch.equal(first["grads"][slot], second["grads"][slot]) for slot in first["grads"])
    found = evaluate(ours.decoder, data, capacity=40, loss=loss)
    assert found.loss == pytest.approx(first["loss"], rel=1e-5) and found.perplexity is None
    assert found.figures == pytest.approx(first["figures"], rel=1e-4, abs=1e-6)
    # As on a GPU, all batches of one shape.
    begin = ours.decoder.begin_batch
    monkeypatch.setattr(ours.decoder, "begin_batch", lambda batch, _, *more, **how: begin(batch, "cpu", *more, **how))
    fixed = evaluate(ours.decoder, data, capacity=40, loss=loss, backend="one shape")
    assert fixed.loss == pytest.approx(found.loss, rel=1e-5)
    assert fixed.figures == pytest.approx(found.figures, rel=1e-4, abs=1e-6)


def test_kl_lasts_for_one_step(model: Model) -> None:
    """The update clears it, and a step without desirable answers reports no mean of them."""
    ours, loss, data = model("qwen3"), loss_of("kto"), preferred.rated()[1:3]
    weights = ours.arena.weights.clone()
    loader = Loader(data, tokens_per_step=999, micro_capacity=99, seed=3, layout=loss.layout(data))
    (batches,), step = loader.epoch(0), Step(ours.decoder, ours.arena, loss=loss)
    pipeline = HostPipeline(step)
    pipeline.micro(pipeline.stage(batches[0]), 0)
    assert step.ahead[1] == 2
    pipeline.update(HYPER | {"divisor": 2.0, "lr": 0.0})
    (done,) = pipeline.finished()
    assert not step.ahead.any() and done.more["chosen"] != done.more["chosen"] and done.more["rejected"] < 1
    ours.arena.weights.copy_(weights)
    ours.arena.publish()


def test_mismatched_answers() -> None:
    """Every prompt gets the answer before it, the first one the last."""

    def example(prompt: list[int], answer: list[int]) -> Example:
        return Example(prompt + answer, [False] * len(prompt) + [True] * len(answer))

    data = [example([1, 2], [3]), example([4], [5, 6]), example([7, 8, 9], [10])]
    found = mismatched(data)
    assert longest_mismatched(data) == 3 + 2 and longest_mismatched([]) == 0
    assert mismatched([example([1, 2], []), example([3], [4])])[0].tokens == [1, 2, 4]
    assert [e.tokens for e in found] == [[1, 2, 10], [4, 3], [7, 8, 9, 5, 6]]
    assert [e.supervised for e in found] == [[False] * 2 + [True], [False, True], [False] * 3 + [True] * 2]


def test_one_table_has_every_loss() -> None:
    assert tuple(LOSSES) == get_args(LossName)
    assert set().union(*(row.settings for row in LOSSES.values())) == set(LOSS_SETTINGS) - {"loss"}
    for name in LOSSES:
        loss = choose(TrainConfig(loss=name))  # type: ignore[arg-type]
        assert set(loss.better) <= set(loss.figures)
    assert choose(TrainConfig(loss="simpo")).beta == 2.5 and choose(TrainConfig(loss="ipo")).beta == 0.1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"beta": 0.2}, "beta is set and loss is cross_entropy, which does not use it; leave beta out, or set"),
        ({"loss": "dpo", "gamma": 1.0}, "gamma is set and loss is dpo, .* or set loss to simpo"),
        ({"loss": "ppo", "divide_by": 64.0}, "divide_by is set and divide is tokens, .* or set divide to constant"),
        ({"loss": "orpo", "sft_share": 0.5}, "sft_share is set and loss is orpo"),
        ({"loss": "simpo", "reference": "start"}, "reference is set and loss is simpo"),
        ({"loss": "dpo", "method": "full"}, "which leaves no base to compare with; set reference to start"),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_used_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(GraftuneError, match=why):
        choose(TrainConfig(**settings))
    fits = dataclasses.replace(TrainConfig(loss="dpo", method="full"), reference="start")
    assert choose(fits).reference == "start"


def test_preferences_have_a_learning_rate_of_their_own() -> None:
    asked = Config.of({"loss": "dpo"})
    found = auto.with_lr(asked, 10**9, LOSSES["dpo"].lr)
    assert found.optim.lr == 1e-5 and auto.explanation(asked, found, 10**9, 1e-5) == "auto: lr 1e-05 for the loss dpo"


def llamafactory_orpo(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    """ORPO as LLaMA-Factory 0.9.5 documents it, of mean log-probabilities per token."""
    log_odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return -chosen + beta * -torch.nn.functional.logsigmoid(log_odds)


def test_orpo_is_llamafactorys() -> None:
    """Value and derivative of each pair, from improbable answers to nearly certain ones."""
    draw, beta = torch.Generator().manual_seed(4), 0.4
    tokens = torch.randint(1, 30, (2, 200), generator=draw).double()
    means = (-torch.rand(2, 200, generator=draw, dtype=torch.float64) * 9 - 1e-3).requires_grad_()
    sides = [
        Answers(mean * count, mean * count, count, torch.ones(200)) for mean, count in zip(means, tokens, strict=True)
    ]
    found, want = Orpo(beta).of_pairs(*sides), llamafactory_orpo(means[0], means[1], beta)
    assert torch.allclose(found, want, rtol=1e-9)
    (grad,), (expected,) = (torch.autograd.grad(value.sum(), means, retain_graph=True) for value in (found, want))
    assert torch.allclose(grad, expected, rtol=1e-7)
