"""Losses inside a captured step: weights and the base's second pass are replayed as they run eagerly and on a CPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.synthetic import dataset_of

from graftune.batch import Example
from graftune.data.encoded import Examples
from graftune.data.loader import Loader
from graftune.data.pack import pack
from graftune.losses import Anchored, CrossEntropy, Loss, choose
from graftune.settings.sections import LoraConfig, TrainConfig
from graftune.step.pipeline import HostPipeline
from graftune.step.step import Step
from tests.gpu.test_quantised import base_of
from tests.gpu.test_quantised import ready as device_loop
from tests.gpu.test_step import HYPER, SHAPE, examples, ready
from tests.losses import preferred, sampled
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
            batches = [pack(group, layout=loss.layout(group), shape=SHAPE) for group in groups]
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
    batch = pack(data, layout=loss.layout(data), shape=SHAPE)
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


def referenced(data: list[Example], loss: Loss) -> Examples:
    """The data with stored log-probabilities of a reference model, here random ones."""
    examples = dataset_of(data, kind=loss.data).examples
    store = examples.store.with_reference("base", per_token=False)
    assert store.reference is not None
    store.reference[:] = np.random.default_rng(3).normal(-40, 5, len(store.reference))
    return Examples(store, examples.chosen)


def trained(name: str, base: oracle.Ours, *, graph: bool, stored: bool = False, steps: int = 4, **more: Any) -> Any:
    """(figures of each step, the weights after them, the loop). From the second step on, sending one may not wait."""
    policy = name in sampled.CASES
    loss = choose(TrainConfig(**sampled.CASES[name] if policy else preferred.settings(name)))
    data = sampled.answers() if policy else preferred.data_of(name)
    examples = referenced(data, loss) if stored and loss.reference else data
    torch.manual_seed(5)
    base.arena.weights.copy_(torch.randn(len(base.arena.weights)).mul_(0.05))
    for buffer in (base.arena.grads, base.arena.m, base.arena.v):
        buffer.zero_()
    base.arena.publish()
    _, loop = device_loop(base, graph=graph, loss=loss, **more)
    how = {"tokens_per_step": 10_000, "micro_capacity": 60, "seed": 3, "layout": loss.layout(examples)}
    loader = Loader(examples, **how)  # type: ignore[arg-type]
    shape = loader.capacities(1)
    loader.fix(shape)
    ahead = loader.ahead_shape
    loop.bound_documents(shape.longest, ahead.longest if ahead else 0)
    assert (ahead is not None) == (name == "kto")
    for number in range(steps):
        (staged,) = loader.epoch(0, 0, loop.stage)
        hyper = HYPER | {"divisor": loader.divisor(0, 0)}
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            loop.step(staged, hyper, range(len(staged)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(staged) > 1
    figures = [done._replace(tag=None) for done in loop.finished(wait=True)]
    assert len(loop.ahead_inputs) == (name == "kto")
    return figures, base.arena.weights.clone(), loop


@pytest.fixture(scope="module")
def bases(tiny_folder: Any) -> Any:
    """A base in bf16, and one in NF4."""
    lora = LoraConfig(rank=4, alpha=8.0)

    def make(kind: str) -> oracle.Ours:
        if kind == "bf16":
            return oracle.ours(tiny_folder("llama"), lora, device="cuda", compute=torch.bfloat16)
        return oracle.place(base_of("nf4")[0], lora, "nf4", "cuda", torch.bfloat16)

    return functools.cache(make)


@pytest.mark.parametrize("kind", ["bf16", "nf4"])
@pytest.mark.parametrize("name", [*preferred.CASES, "cispo, sequence", "dapo, kl"])
def test_captured_are_eager_bit_for_bit(name: str, kind: str, bases: Any, deterministic: None) -> None:
    """Autograd over the log-probabilities inside the graph; KTO's sums ahead of a step in a graph of their own; the
    reference computed in the step, and stored. Without a host synchronisation."""
    for stored in (False, True) if name in preferred.CASES else (False,):
        figures, weights, loop = trained(name, bases(kind), graph=True, stored=stored, deterministic=True)
        figures_, weights_, _ = trained(name, bases(kind), graph=False, stored=stored, deterministic=True)
        assert figures == figures_ and torch.equal(weights, weights_)
        assert loop.captures == 1 and all(one.run.graph is not None for one in loop.ahead_inputs.values())
        assert (figures[-1].loss < figures[0].loss) or name in sampled.CASES
        assert not any(one.skipped for one in figures)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_preferences_like_on_a_cpu(name: str, tiny_folder: Any) -> None:
    """fp32, in captured micro-batches of a fixed shape, against one eager batch."""
    lora = LoraConfig(rank=4, alpha=8.0)
    ours = oracle.ours(tiny_folder("llama"), lora, device="cuda")
    figures, _, _ = trained(name, ours, graph=True, steps=3)
    cpu, loss, data = oracle.ours(tiny_folder("llama"), lora), choose(TrainConfig(**preferred.settings(name))), []
    torch.manual_seed(5)
    cpu.arena.weights.copy_(torch.randn(len(cpu.arena.weights)).mul_(0.05))
    cpu.arena.publish()
    data = preferred.data_of(name)
    how = {"tokens_per_step": 10_000, "micro_capacity": 1000, "seed": 3, "layout": loss.layout(data)}
    loader, loop = Loader(data, **how), HostPipeline(Step(cpu.decoder, cpu.arena, loss=loss))  # type: ignore[arg-type]
    for want in figures:
        (staged,) = loader.epoch(0, 0, loop.stage)
        loop.step(staged, HYPER | {"divisor": loader.divisor(0, 0)}, [0])
        (found,) = loop.finished()
        assert found.loss == pytest.approx(want.loss, rel=1e-4)
        assert found.more == pytest.approx(want.more, rel=1e-2, abs=1e-4)
