"""Sampling on CUDA: captured rounds, queued ahead of the host. What a sample is does not depend on the others."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.synthetic import random_base

from graftune.infer import generate
from graftune.infer.cache import CacheShape, CacheSize
from graftune.infer.generate import Sampler, Token, requests_of, sampler_for
from graftune.infer.sample import Sampling
from graftune.kernels import draw
from graftune.kernels.attention import choose, for_any_shape
from graftune.model.decoder import PackedDocuments
from graftune.model.lora import initialise
from graftune.settings.sections import LoraConfig
from tests.support import families, moe, oracle, quantised, specs, tiny

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
PROMPTS = [[3], *[[40, 7, 99] * 9] * 3, [11, 250, 6, 4, 30, 21], *[[200, 5, 18, 77] * 12] * 4, [8, 9]]
HOT = Sampling(40, temperature=1.3, top_p=0.97, seed=5)
STOPS = range(0, tiny.VOCAB, 9)[:40]


def drawn(sampler: Sampler, prompts: Any, numbers: Any, how: Sampling = HOT) -> list[list[Token]]:
    answers: list[list[Token]] = [[] for _ in prompts]
    for fresh in sampler.rounds(prompts, how, STOPS, numbers=numbers):
        for index, tokens in fresh.items():
            answers[index] += tokens
    return answers


def made(decoder: Any, budget: int = 1 << 33, prompts: Any = PROMPTS) -> Sampler:
    backend = "triton" if decoder.compute == torch.float32 else "flash"
    return sampler_for(decoder, requests_of(decoder, prompts, 40), budget, backend)


def ids(answers: list[list[Token]]) -> list[list[int]]:
    return [[token.id for token in answer] for answer in answers]


MIXTURES = ("qwen3_moe", "gpt_oss-mxfp4")


@pytest.mark.parametrize(
    "variant", ["llama", "mistral-window", "gemma2-odd", "phi3-long", "lfm2", "qwen3_5", "gemma4", *MIXTURES]
)
def test_a_sample_is_the_same_alone_and_in_any_batch(
    variant: str, tiny_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "SHORT", 1)  # so that rounds shrink, and sequences move
    if variant == "gemma4":
        placed = quantised.placed(families.base_of(families.spec(variant)), LoraConfig(rank=4), "fp32", "cuda")
    else:
        folder = moe.make_folder(variant, tmp_path / "base") if variant in MIXTURES else tiny_folder(variant)
        placed = oracle.ours(folder, device="cuda", base_dtype="keep" if variant == "gpt_oss-mxfp4" else "fp32")
    decoder = placed.decoder
    alone = [drawn(made(decoder, prompts=[p]), [p], [n])[0] for n, p in enumerate(PROMPTS)]
    size = CacheSize.of(decoder.spec, decoder.compute)
    most = CacheShape.of(size, requests_of(decoder, PROMPTS, 40), 1 << 40).bytes(size)
    for budget in (1 << 33, most // 3):
        together = drawn(made(decoder, budget), PROMPTS, range(len(PROMPTS)))
        assert ids(together) == ids(alone)
        for got, want in zip(together, alone, strict=True):
            for token, other in zip(got, want, strict=True):
                assert token[1:] == pytest.approx(other[1:], rel=1e-5, abs=1e-5)
    assert len({len(answer) for answer in alone}) > 3


def test_bit_equal_within_a_captured_size_and_captured_once(tiny_folder: Any) -> None:
    decoder = oracle.ours(tiny_folder("llama"), device="cuda").decoder
    others = [PROMPTS[1], PROMPTS[0], *PROMPTS[2:]]
    sampler = made(decoder, prompts=[[5] * 60] * len(PROMPTS))
    never = Sampling(40, temperature=1.3, seed=5)
    one = list(sampler.rounds(PROMPTS, never, (), numbers=range(10)))
    captured = dict(sampler.graphs)
    two = list(sampler.rounds([PROMPTS[0], *others[1:]], never, (), numbers=[0, *range(50, 59)]))
    assert [step[0] for step in one] == [step[0] for step in two]
    assert sampler.graphs == captured, "the same graphs"
    before = torch.cuda.memory_allocated()
    for seed in range(5):
        list(sampler.rounds(PROMPTS, Sampling(40, temperature=1.0, seed=seed), ()))
    assert sampler.graphs == captured and torch.cuda.memory_allocated() == before
    del sampler, captured
    gc.collect()


@pytest.mark.parametrize("kind", ["bf16", "nf4", "fp8", "Q4_K"])
def test_sampled_log_probabilities_are_close_to_recomputed_ones(kind: str) -> None:
    blocks = kind == "Q4_K"
    spec = specs.made(
        layers=4, width=1024, ffn=2816, heads=16, kv_heads=4, head_width=64, vocab=32000, norm_eps=1e-5,
        rope_theta=10000.0, max_positions=4096, tied=not blocks,  # a table of blocks would make the logits large
    )  # fmt: skip
    torch.manual_seed(3)
    base = quantised.gguf_base(kind, spec) if blocks else random_base(spec, CUDA)
    ours = oracle.place(base, LoraConfig(rank=16), "keep" if blocks else kind, "cuda", torch.bfloat16)
    initialise(ours.arena, ours.lora, seed=1)
    decoder = ours.decoder
    prompts = [torch.randint(0, spec.vocab, (n,)).tolist() for n in (300, 1500, 20, 64)]
    backend = for_any_shape(choose(CUDA, torch.bfloat16, 64, False, False).backend, CUDA, torch.bfloat16, 64)
    sampler = sampler_for(decoder, requests_of(decoder, prompts, 128), 1 << 34, backend)
    answers: list[list[Token]] = [[] for _ in prompts]
    for fresh in sampler.rounds(prompts, Sampling(128, temperature=1.0, seed=2), ()):
        for index, tokens in fresh.items():
            answers[index] += tokens
    off = []
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers, strict=True):
            text = torch.tensor(prompt + [token.id for token in answer], device="cuda")
            documents = PackedDocuments.of([len(text)], CUDA, backend)
            x = decoder.hidden(text, decoder.begin(torch.arange(len(text), device="cuda"), documents))
            want = torch.log_softmax(decoder.logits(x[len(prompt) - 1 : -1]).float(), -1)
            want = want.gather(1, text[len(prompt) :, None]).squeeze(1).cpu()
            off.append((torch.tensor([token.logprob for token in answer]) - want).abs())
    assert float(torch.cat(off).mean()) < 0.005


@pytest.mark.parametrize(("mode", "top_k", "top_p"), [("whole", 0, 1.0), ("limited", 200, 1.0), ("limited", 0, 0.7)])
def test_20_000_draws_of_a_large_vocabulary(mode: str, top_k: int, top_p: float) -> None:
    logits = torch.randn(151_936, device="cuda") * 3
    settings = draw.DrawSettings.of(1.0, top_k, top_p, 1, CUDA)
    samples = torch.arange(20_000, device="cuda")
    found = torch.cat(
        [
            draw.draw(logits.expand(500, -1).contiguous(), mode, settings, some, some * 0).tokens
            for some in samples.split(500)
        ]
    )
    shares, order = torch.softmax(logits.double(), -1).sort(descending=True)
    shares[top_k or len(shares) :] = 0
    shares *= shares.cumsum(0) - shares < top_p * shares.sum()
    want = torch.zeros_like(shares).index_copy_(0, order, shares / shares.sum())
    assert want[found].all(), "a token that top-k or top-p leaves out"
    bins = torch.empty_like(order)
    bins[order] = (want[order].cumsum(0) * 100).long().clamp(max=99)  # a hundred bins of about equal weight
    expected = torch.zeros(100, dtype=torch.float64, device="cuda").index_add_(0, bins, want) * 20_000
    observed = torch.bincount(bins[found], minlength=100).double()
    some = expected > 5
    statistic = float(((observed - expected).square() / expected)[some].sum())
    freedom = int(some.sum()) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
