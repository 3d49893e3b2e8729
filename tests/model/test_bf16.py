"""bf16 compute is fp32 compute within bf16 noise: loss within 0.5%, each gradient within 2% in norm, cosine > 0.999."""

from __future__ import annotations

import torch

from graftune.batch import Example
from graftune.model.lora import build_arena
from graftune.runtime import Runtime
from graftune.settings.sections import LoraConfig
from graftune.weights.base import open_base
from graftune.weights.load import build_decoder
from graftune.weights.placement import Placement
from tests.support import oracle, tiny


def test_bf16_is_fp32_within_noise(tiny_folder):
    fp32 = oracle.ours(tiny_folder("llama-untied"), LoraConfig(rank=4, alpha=8.0))
    runtime = Runtime(torch.device("cpu"), torch.bfloat16, "test")
    base = open_base(str(tiny_folder("llama-untied")))
    arena = build_arena(base.spec, fp32.lora, runtime.device, runtime.compute)
    arena.weights.copy_(fp32.arena.weights)
    arena.publish()
    decoder = build_decoder(base, arena, fp32.lora, runtime, Placement("bf16", "test"))
    bf16 = oracle.Ours(base, decoder, arena, fp32.lora)
    tokens = torch.randint(3, tiny.VOCAB, (4, 60)).tolist()
    batch = [Example(t, [i > 20 for i in range(60)]) for t in tokens]
    want_loss, want = fp32.gradients(batch)
    loss, got = bf16.gradients(batch)
    assert abs(loss - want_loss) / want_loss < 0.005
    joined, reference = (torch.cat([g.flatten() for g in grads.values()]) for grads in (got, want))
    assert torch.nn.functional.cosine_similarity(joined, reference, dim=0) > 0.999
    assert abs(joined.norm() - reference.norm()) / reference.norm() < 0.02
    assert arena.grads.dtype == torch.float32
