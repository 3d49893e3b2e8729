"""The eager path on CUDA: the same numbers as on the CPU, training lowers the loss, generation gives the same text."""

from __future__ import annotations

import json

import pytest
import torch

import graftune
from graftune.batch import Example
from graftune.data.pack import pack
from graftune.infer import generate as generating
from graftune.infer.sample import Sampling
from graftune.settings.sections import LoraConfig
from graftune.step.step import Step
from tests.support import oracle, tiny
from tests.support.generate import generate

pytestmark = pytest.mark.gpu


def batch():
    tokens = torch.randint(3, tiny.VOCAB, (3, 40), generator=torch.Generator().manual_seed(3)).tolist()
    return pack([Example(t[: 40 - 7 * i], [j > 9 for j in range(40 - 7 * i)]) for i, t in enumerate(tokens)])


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen2", "qwen3", "llama-yarn"])
def test_gradients_equal_the_cpus(variant, tiny_folder):
    lora = LoraConfig(rank=4, alpha=10.0, train_norms=True)
    cpu = oracle.ours(tiny_folder(variant), lora)
    gpu = oracle.ours(tiny_folder(variant), lora, device="cuda")
    gpu.arena.weights.copy_(cpu.arena.weights)
    gpu.arena.publish()
    figures = []
    for side in (cpu, gpu):
        step = Step(side.decoder, side.arena)
        step.micro_step(batch().to(side.arena.device))
        figures.append((step.loss_sum.cpu(), side.arena.grads.cpu()))
    assert torch.allclose(figures[0][0], figures[1][0], rtol=1e-5)
    assert (figures[0][1] - figures[1][1]).norm() / figures[0][1].norm() < 1e-4


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("base_dtype", ["auto", "keep"])
def test_training_lowers_the_loss_and_saves(compute, base_dtype, tiny_folder, tmp_path):
    rows = [{"prompt": f"Say {i}", "response": f"It is {i}."} for i in range(12)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    run = graftune.open(
        str(tiny_folder("llama")), device="cuda", compute_dtype=compute, base_dtype=base_dtype, lr=1e-2, dropout=0.1
    )
    examples = run.prepare(str(data))
    before = run.evaluate(examples).loss
    for epoch in range(10):
        for micro in run.batches(examples, epoch):
            run.forward_backward(micro)
        stats = run.optim_step()
        assert not stats.skipped and stats.grad_norm > 0
    assert run.evaluate(examples).loss < before * 0.9
    run.save(tmp_path / "adapter")
    again = graftune.open(str(tmp_path / "adapter"), device="cpu", compute_dtype="fp32")
    assert again.evaluate(examples).loss == pytest.approx(run.evaluate(examples).loss, rel=0.02)
    assert run.generate("Say 3", max_new_tokens=8)


@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize("variant", [*tiny.FAMILIES, "phi3-long", "gemma2-odd"])
def test_a_captured_token_step_gives_the_eager_ones_text(variant, adapted, tiny_folder, monkeypatch):
    """Four prompts, of which some end early; fp32, so that the size of the batch decides nothing."""
    if not tiny.in_transformers(variant):
        pytest.skip(f"the transformers of this machine has no {variant}")
    ours = oracle.ours(tiny_folder(variant), device="cuda")
    prompts = [[40, 7, 99], [3], [200, 5, 5, 18, 77, 150, 31, 8, 8, 64, 12, 90], [11, 250, 6, 4, 30, 21]]
    backend = "flash" if ours.decoder.compute != torch.float32 else "triton"

    def texts(stops):
        sampling = Sampling(max_new_tokens=24)
        return generate(ours.decoder, prompts, sampling, stops, adapted=adapted, backend=backend)

    stops = (texts(())[0][5],)
    replayed = texts(stops)
    monkeypatch.setattr(generating, "Captured", lambda work, **_: work)
    assert texts(stops) == replayed
    assert len(replayed[0]) <= 5
