"""A weighted, anchored step by the kernels, adapters beside the weights, against the references on the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from graftune.batch import Example
from graftune.data.pack import pack
from graftune.losses import Anchored
from graftune.settings.sections import LoraConfig
from graftune.step.step import Step
from tests.kernels.harness import same_gradients, start_from, through_kernels
from tests.support import oracle, tiny


def test_an_anchored_step_equals_the_references(shallow_folder, device, monkeypatch):
    tokens = torch.randint(3, tiny.VOCAB, (2, 10), generator=torch.Generator().manual_seed(4)).tolist()
    data = [Example(t, [j > 2 for j in range(10)], weights=[0.5 + j for j in range(10)]) for t in tokens]
    loss, lora = Anchored(0.2), LoraConfig(rank=4, alpha=10.0)
    exact = pack(data, layout=loss.layout(data))
    padded = pack(data, layout=loss.layout(data), capacity=24, max_docs=4, max_rows=16)
    cpu = oracle.ours(shallow_folder("llama"), lora)
    want = Step(cpu.decoder, cpu.arena, loss=loss)
    want.micro_step(exact)
    through_kernels(monkeypatch)
    ours = oracle.ours(shallow_folder("llama"), replace(lora), device=device)
    start_from(ours, cpu.arena.weights)
    step = Step(ours.decoder, ours.arena, loss=loss, attention_backend="triton")
    step.micro_step(padded.to(torch.device(device)))
    assert torch.allclose(step.loss_sum.cpu(), want.loss_sum, rtol=1e-4)
    assert torch.allclose(step.figure_sums.cpu(), want.figure_sums, rtol=1e-3) and want.figure_sums[1] > 0.1
    same_gradients(cpu.arena, ours.arena.grads.cpu(), cpu.arena.grads)
