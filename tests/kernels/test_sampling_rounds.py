"""Prompts read in pieces and rounds of sampling, by the kernels and by the references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftune.infer import cache as caches
from graftune.infer.generate import Token, requests_of, sampler_for
from graftune.infer.sample import Sampling
from graftune.model.lora import initialise
from graftune.settings.sections import LoraConfig
from tests.kernels.harness import start_from, through_kernels
from tests.support import oracle

LORA = LoraConfig(rank=4, alpha=8.0)
PROMPTS = [*[[40, 7, 99, 12, 5, 77, 31] * 3] * 2, [3]]


def drawn(side: Any, backend: str) -> list[list[Token]]:
    decoder = side.decoder
    sampler = sampler_for(decoder, requests_of(decoder, PROMPTS, 3), 1 << 30, backend)
    sampler.batch.ahead = True
    answers: list[list[Token]] = [[] for _ in PROMPTS]
    for fresh in sampler.rounds(PROMPTS, Sampling(3, temperature=1.0, top_p=0.9, seed=2), ()):
        for index, tokens in fresh.items():
            answers[index] += tokens
    return answers


LAYERS: dict[str, Any] = {
    "llama": {},
    "mistral-window": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"]},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("variant", LAYERS)
def test_the_kernels_sample_what_the_references_sample(
    variant: str, shallow_folder: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "CHUNK", 16)
    plain = oracle.ours(shallow_folder(variant, **LAYERS[variant]), LORA)
    initialise(plain.arena, plain.lora, seed=1)
    torch.nn.init.normal_(plain.arena.weights, std=0.05)
    plain.arena.publish()
    want = drawn(plain, "cpu")
    through_kernels(monkeypatch)
    fused = oracle.ours(shallow_folder(variant, **LAYERS[variant]), LORA, device=device)
    start_from(fused, plain.arena.weights)
    got = drawn(fused, "triton")
    for ours, theirs in zip(got, want, strict=True):
        assert [token.id for token in ours] == [token.id for token in theirs] and len(ours) == 3
        for one, other in zip(ours, theirs, strict=True):
            assert one[1:] == pytest.approx(other[1:], abs=1e-4)
