"""Losses inside a captured step: weights and the base's second pass are replayed as they run eagerly and on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graftune.data.pack import pack, pack_ahead
from graftune.losses import Anchored, CrossEntropy, Loss, choose
from graftune.ranks import WHOLE
from graftune.settings.config import TrainConfig
from graftune.step.step import Step
from tests.gpu.test_step import HYPER, SHAPE, examples, ready
from tests.losses import preferred
from tests.support import oracle

pytestmark = pytest.mark.gpu


def weighted(seed: int, *lengths: int):
    drawn = torch.Generator().manual_seed(seed)
    return [
        replace(e, weights=(3 * torch.rand(len(e.tokens), generator=drawn)).tolist()) for e in examples(seed, *lengths)
    ]


@pytest.mark.parametrize("loss", [CrossEntropy(), Anchored(0.3)], ids=["cross_entropy", "anchored"])
def test_captured_is_eager_bit_for_bit(loss: Loss, tiny_folder, deterministic: None) -> None:
    found = []
    for graph in (True, False):
        ours, _, loop = ready(tiny_folder("llama"), graph=graph, compute=torch.bfloat16, dropout=0.1, loss=loss)
        for i in range(6):
            groups = weighted(2 * i, 20, 33 + i), weighted(2 * i + 1, 60)
            batches = [pack(group, layout=loss.layout(group), **SHAPE) for group in groups]
            hyper = HYPER | {"divisor": sum(batch.divisor for batch in batches)}
            loop.step([loop.stage(batch) for batch in batches], hyper, [7, 8])
        steps = [figures._replace(tag=None) for figures in loop.finished(wait=True)]
        found.append((steps, ours.arena.weights.clone()))
        assert loop.captures == (1 if graph else 0)
    (figures, weights), (figures_, weights_) = found
    assert figures == figures_ and torch.equal(weights, weights_)
    assert set(figures[0].more) == set(loss.figures)


@pytest.mark.parametrize("loss", [CrossEntropy(), Anchored(0.3)], ids=["cross_entropy", "anchored"])
def test_like_on_a_cpu(loss: Loss, tiny_folder) -> None:
    data = weighted(3, 20, 33)
    batch = pack(data, layout=loss.layout(data), **SHAPE)
    ours, step, _ = ready(tiny_folder("llama"), graph=False, loss=loss)
    step.micro_step(batch.to(torch.device("cuda")))
    cpu = oracle.ours(tiny_folder("llama"), ours.lora)
    cpu.arena.weights.copy_(ours.arena.weights)
    cpu.arena.publish()
    other = Step(cpu.decoder, cpu.arena, loss=loss)
    other.micro_step(batch)
    assert float(step.loss_sum) == pytest.approx(float(other.loss_sum), rel=1e-4)
    assert torch.allclose(step.figure_sums.cpu(), other.figure_sums, rtol=1e-3)
    grads, want = ours.arena.grads.cpu(), cpu.arena.grads
    assert (grads - want).norm() < 1e-3 * want.norm()


@pytest.mark.parametrize("name", ["dpo, sft", "orpo", "kto"])
def test_preferences_captured_are_eager_bit_for_bit(name: str, tiny_folder, deterministic: None) -> None:
    """Autograd over the log-probabilities inside the graph, and KTO's sums ahead before it."""
    found = []
    for graph in (True, False):
        loss, data = choose(TrainConfig(**preferred.settings(name))), preferred.data_of(name)
        ours, _, loop = ready(tiny_folder("llama"), graph=graph, loss=loss)
        layout = loss.layout(data)
        for _ in range(4):
            batches = [pack(part, layout=layout, **SHAPE) for part in (data[:4], data[4:])]
            if layout.ahead is not None:
                batches[0].ahead = pack_ahead(data, layout, 160, WHOLE)
            hyper = HYPER | {"divisor": sum(batch.divisor for batch in batches)}
            loop.step([loop.stage(batch) for batch in batches], hyper, [7, 8])
        steps = [figures._replace(tag=None) for figures in loop.finished(wait=True)]
        found.append((steps, ours.arena.weights.clone()))
        assert loop.captures == (1 if graph else 0)
    (figures, weights), (figures_, weights_) = found
    assert figures == figures_ and torch.equal(weights, weights_) and figures[-1].loss < figures[0].loss
