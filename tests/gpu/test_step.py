"""The captured step by itself: it equals the eager one, follows live hyperparameters, skips what is not finite inside
the graph, accumulates as one batch would, keeps documents apart and never waits."""

from __future__ import annotations

import pytest
import torch

from graftune.batch import Example
from graftune.data.pack import Capacities, pack
from graftune.kernels import attention
from graftune.model.decoder import Decoder, PackedDocuments
from graftune.settings.sections import LoraConfig
from graftune.step.pipeline import DevicePipeline
from graftune.step.step import Step
from tests.support import oracle, tiny

pytestmark = pytest.mark.gpu
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01, "clip": 1.0}
SHAPE = Capacities(160, 8, 128, 64)


def examples(seed: int, *lengths: int) -> list[Example]:
    drawn = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, tiny.VOCAB, (n,), generator=drawn).tolist() for n in lengths]
    return [Example(row, [i > 4 for i in range(len(row))]) for row in rows]


def documents_stay_apart(decoder: Decoder, backend: str) -> None:
    """Other tokens in one document leave the logits of the others as they are, to the bit."""
    given = [one.tokens for one in examples(1, 20, 33, 5)]
    other = [given[0], [3 + (token + 5) % (tiny.VOCAB - 3) for token in given[1]], given[2]]
    lengths, device = list(map(len, given)), torch.device("cuda")
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    found = []
    with torch.no_grad():
        for texts in (given, other):
            documents = PackedDocuments.of(lengths, device, backend)
            tokens = torch.tensor([token for text in texts for token in text], device=device)
            found.append(decoder.logits(decoder.hidden(tokens, decoder.begin(positions, documents))).split(lengths))
    same = [torch.equal(a, b) for a, b in zip(*found, strict=True)]
    assert same == [True, False, True]


def ready(folder, *, graph: bool = True, compute: torch.dtype = torch.float32, deterministic: bool = True, **more):
    ours = oracle.ours(folder, LoraConfig(rank=4, alpha=8.0), device="cuda", compute=compute)
    torch.manual_seed(5)
    ours.arena.weights.copy_(torch.randn(len(ours.arena.weights)).mul_(0.05))
    ours.arena.publish()
    head = ours.decoder.spec.attention[0].head_width
    backend = attention.choose(torch.device("cuda"), compute, head, deterministic, False).backend
    step = Step(ours.decoder, ours.arena, attention_backend=backend, longest=64, **more)
    return ours, step, DevicePipeline(step, graph)


def run(loop, batches, **hyper) -> None:
    packed = [pack(batch, shape=SHAPE) for batch in batches]
    divisor = float(sum(b.response_tokens for b in packed))
    loop.step([loop.stage(b) for b in packed], HYPER | hyper | {"divisor": divisor}, [7] * len(packed))


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
def test_captured_is_eager_bit_for_bit(compute, tiny_folder, deterministic):
    found = []
    for graph in (True, False):
        ours, step, loop = ready(tiny_folder("llama"), graph=graph, compute=compute, dropout=0.1)
        for i in range(14):
            run(loop, [examples(2 * i, 20, 33 + i), examples(2 * i + 1, 60)], lr=1e-2 / (i + 1))
        figures = [f[1:] for f in loop.finished(wait=True)]
        found.append((figures, ours.arena.weights.clone(), ours.arena.m.clone(), int(step.count)))
        assert loop.captures == (1 if graph else 0)
    (figures, weights, m, count), (figures_, weights_, m_, count_) = found
    assert figures == figures_ and torch.equal(weights, weights_) and torch.equal(m, m_)
    assert count == count_ >= 1


def test_hyperparameters_are_live_after_the_capture(tiny_folder):
    ours, _, loop = ready(tiny_folder("llama"))
    still = {"lr": 0.0, "weight_decay": 0.0, "beta1": 0.0}
    for i in range(2):
        run(loop, [examples(i, 40)])
    loop.finished(wait=True)
    before = ours.arena.weights.clone()
    run(loop, [examples(5, 40)], **still, beta2=0.0, clip=1e9)
    figures = loop.finished(wait=True)[-1]
    assert torch.equal(ours.arena.weights, before), "at a rate of zero nothing moves"
    assert float(ours.arena.m.norm()) == pytest.approx(figures.grad_norm, rel=1e-4), "with betas of zero: the gradient"
    torch.testing.assert_close(ours.arena.v, ours.arena.m**2)
    run(loop, [examples(5, 40)], **still, beta2=0.5, clip=1e-3)
    clipped = loop.finished(wait=True)[-1]
    assert clipped.grad_norm == pytest.approx(figures.grad_norm, rel=1e-5) and figures.grad_norm > 1e-2
    assert float(ours.arena.m.norm()) == pytest.approx(1e-3, rel=1e-3), "the norm is told as it was, and clipped"
    assert loop.captures == 1


def test_an_overflow_in_fp16_is_skipped_inside_the_graph_and_halves_the_scale(tiny_folder, monkeypatch):
    monkeypatch.setattr("graftune.step.step.FP16_UNIT", 1.0)  # too large a unit for these gradients at first
    ours, step, loop = ready(tiny_folder("llama"), compute=torch.float16)
    before, seen = ours.arena.weights.clone(), []
    for i in range(24):
        run(loop, [examples(i, 40)])
        (figures,) = loop.finished(wait=True)
        seen.append((figures.skipped, float(step.scaler.state[0]), int(step.count)))
        if all(skipped for skipped, *_ in seen):
            assert torch.equal(ours.arena.weights, before) and not ours.arena.m.any(), "nothing of it is left"
    skips = sum(skipped for skipped, *_ in seen)
    assert seen[0][0] and not seen[-1][0] and loop.captures == 1
    assert seen[-1][1] == 65536.0 / 2**skips and seen[-1][2] == len(seen) - skips
    assert not torch.equal(ours.arena.weights, before)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_micro_batches_equal_one_batch_and_packing_changes_nothing(compute, tiny_folder):
    """Through the captured loop: at a rate of zero the first moment is the gradient, clipped to its own norm."""
    found, data = [], examples(1, 20, 30, 41, 9)
    for batches in ([data], [data[:2], data[2:]], [[e] for e in data]):
        ours, _, loop = ready(tiny_folder("qwen3"), compute=compute)
        for _ in range(2):  # the first captures
            run(loop, batches, lr=0.0, weight_decay=0.0, beta1=0.0, clip=1e9)
        figures = loop.finished(wait=True)
        assert loop.captures == 1 and figures[0].loss == figures[1].loss
        found.append((figures[-1].loss, ours.arena.m.clone()))
    near, far = (1e-5, 1e-4) if compute == torch.float32 else (2e-3, 2e-2)
    for loss, grad in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=near)
        assert (grad - found[0][1]).norm() < far * found[0][1].norm()


def never_waits(loop) -> None:
    """Six steps of unlike documents without a host synchronisation, by one capture."""
    run(loop, [examples(0, 40)])
    run(loop, [examples(1, 12, 60)])
    staged = [[loop.stage(pack(examples(i, 10 + i, 50 - i), shape=SHAPE))] for i in range(6)]
    finished = len(loop.finished(wait=True))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for slots in staged:
            loop.step(slots, HYPER | {"divisor": 40.0}, [0])
            finished += len(loop.finished())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert finished + len(loop.finished(wait=True)) == 8 and loop.captures == 1


def test_nothing_waits_and_nothing_is_captured_again(tiny_folder):
    never_waits(ready(tiny_folder("llama"), compute=torch.bfloat16, deterministic=False, tuned=True)[2])
