"""The default base against llama.cpp on the same file: not our formulas in another spelling but another program.

llama.cpp rounds activations to 8 bits, so logits cannot be equal; the token they pick nearly always is. It writes
1,000 tokens, half of them greedily and half drawn at temperature 0.8, so that unsure positions count too; it names its
top token at each, and we are led along the same text and name ours. One greedy answer and one drawn answer share a
prompt, which llama.cpp then reads once.
"""

from __future__ import annotations

import json
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from graftune.infer.generate import generate
from graftune.infer.sample import Sampling
from graftune.model.decoder import PackedDocuments
from tests import oracle

QUESTIONS = (
    "Tell me how a bicycle stays upright.",
    "Write a short story about a fox who learns to swim.",
    "Explain photosynthesis to a child.",
    "Give me three tips for growing tomatoes.",
    "What causes the seasons?",
    "Describe the city of Lisbon.",
    "How do I bake bread without yeast?",
    "Write a poem about winter mornings.",
    "What is the difference between a virus and a bacterium?",
    "Summarise the story of Romeo and Juliet.",
    "Write a Python function that reverses a list.",
    "Why is the sky blue?",
    "List five animals that sleep in winter.",
    "How does a refrigerator work?",
    "Write a letter of thanks to a teacher.",
    "What should I pack for a week of hiking?",
    "Explain what inflation means.",
    "How are mountains formed?",
    "Give me advice for a job interview.",
    "Tell me about the history of chess.",
)
GREEDY, DRAWN = 28, 28


@dataclass
class Written:
    """What llama.cpp wrote after a prompt, and its top token at each of those positions."""

    prompt: list[int]
    tokens: list[int]
    top: list[int]


@pytest.fixture(scope="module")
def prompts(smollm2_ours: oracle.Ours) -> list[list[int]]:
    turns = (f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS)
    return [smollm2_ours.base.tokenizer.encode(text) for text in turns]


@pytest.fixture(scope="module")
def written(smollm2: Path, prompts: list[list[int]]) -> tuple[list[Written], list[Written]]:
    """(greedy, drawn) answers to every prompt."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(smollm2)
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    server = xllamacpp.Server(params)

    def write(prompt: list[int], count: int, seed: int, temperature: float) -> Written:
        asked: dict[str, Any] = {"prompt": prompt, "n_predict": count, "temperature": temperature, "seed": seed}
        request = urllib.request.Request(
            server.listening_address + "/completion",
            json.dumps(asked | {"n_probs": 1, "return_tokens": True, "cache_prompt": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            steps = json.load(answer)["completion_probabilities"]
        return Written(prompt, [s["id"] for s in steps], [s["top_logprobs"][0]["id"] for s in steps])

    pairs = [(write(p, GREEDY, i, 0.0), write(p, DRAWN, i, 0.8)) for i, p in enumerate(prompts)]
    return [greedy for greedy, _ in pairs], [drawn for _, drawn in pairs]


def test_top_token_on_a_thousand_positions(
    smollm2_ours: oracle.Ours, written: tuple[list[Written], list[Written]]
) -> None:
    shares = []
    for answers in written:
        theirs = torch.tensor([t for w in answers for t in w.top])
        shares.append((our_top(smollm2_ours, answers) == theirs).float())
    agreed = torch.cat(shares)
    drawn = [t != top for w in written[1] for t, top in zip(w.tokens, w.top, strict=True)]
    print(
        f"same top token: {agreed.mean():.4f} of {len(agreed)}; greedy {shares[0].mean():.4f}, "
        f"drawn {shares[1].mean():.4f}"
    )
    assert len(agreed) >= 1000 and sum(drawn) > 50, "the drawn half must wander off the greedy path"
    assert agreed.mean() >= 0.97


def our_top(ours: oracle.Ours, answers: list[Written]) -> torch.Tensor:
    """Our top token where each token of the answers was written, all answers packed into one forward."""
    rows, at = [], 0
    for w in answers:
        first = at + len(w.prompt) - 1
        rows.append(torch.arange(first, first + len(w.tokens)))
        at += len(w.prompt) + len(w.tokens)
    lengths = tuple(len(w.prompt) + len(w.tokens) for w in answers)
    run = ours.decoder.begin(torch.cat([torch.arange(n) for n in lengths]), PackedDocuments(lengths), adapted=False)
    tokens = torch.tensor([t for w in answers for t in (*w.prompt, *w.tokens)])
    with torch.no_grad():
        x = ours.decoder.hidden(tokens, run, torch.cat(rows))
        return ours.decoder.logits(x, adapted=False).argmax(-1)


def test_first_greedy_tokens(
    smollm2_ours: oracle.Ours, prompts: list[list[int]], written: tuple[list[Written], list[Written]]
) -> None:
    stops = smollm2_ours.base.tokenizer.stop_ids
    got = generate(smollm2_ours.decoder, prompts, Sampling(max_new_tokens=16), stops, adapted=False)
    same = sum(g == [t for t in w.tokens[:16] if t not in stops] for g, w in zip(got, written[0], strict=True))
    print(f"same first 16 tokens: {same} of {len(prompts)}")
    assert same >= 15
