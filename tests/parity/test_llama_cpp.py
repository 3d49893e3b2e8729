"""The default base against llama.cpp on the same file: not our formulas in another spelling but another program.

llama.cpp rounds activations to 8 bits, so logits cannot be equal; the token they pick nearly always is. It writes
1,000 tokens (250 where it is undecided, see OPEN), some greedily and some drawn at temperature 0.8, so that it leaves
the well-trodden path; it names its top token at each, and we are led along the same text and name ours. One greedy
answer and one drawn answer share a prompt, which llama.cpp then reads once.
"""

from __future__ import annotations

import json
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

# Two sets of prompts, and both are judged. OPEN is the one we started with. SmolLM2 is so often undecided on it that
# llama.cpp does not agree with itself: a key cache in fp32 without flash attention instead of its default changes 3.2%
# of its top tokens and 7 of 20 answers. We measured 96.8% to 97.0% and 15 of 20 against the default, 96.5% and 10 of
# 20 against the other, so its limits below allow for that noise; of those twenty questions every second one is asked
# here. PLAIN was chosen after that, for being decided: one likely answer, code, sentences to copy. It is the easier
# set, and holds the full limits: 98.7% and 19 of 20.
OPEN = (
    "Tell me how a bicycle stays upright.",
    "Explain photosynthesis to a child.",
    "What causes the seasons?",
    "How do I bake bread without yeast?",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that reverses a list.",
    "List five animals that sleep in winter.",
    "Write a letter of thanks to a teacher.",
    "Explain what inflation means.",
    "Give me advice for a job interview.",
)
PLAIN = (
    "What is the capital of France?",
    "List the months of the year in order.",
    "Write a Python function that reverses a list.",
    "Write a Python function that adds two numbers.",
    "Which planet is closest to the sun?",
    "What is the chemical symbol for gold?",
    "What is the largest ocean on Earth?",
    "What is the boiling point of water?",
    "Name the colors of the rainbow.",
    "Write a SQL query that selects all users.",
    "What is the opposite of hot?",
    "Who painted the Mona Lisa?",
    "In which year did World War II end?",
    "Write an HTML page that says hello.",
    "Repeat this sentence: The quick brown fox jumps over the lazy dog.",
    "Repeat this sentence: My sister plays the piano every evening after dinner.",
    "Repeat this sentence: The train to the coast leaves at nine in the morning.",
    "Repeat this sentence: We planted twelve apple trees behind the old barn.",
    "Repeat this sentence: Please close the window before it starts to rain.",
    "Repeat this sentence: The museum opens on Tuesday and closes on Sunday.",
)
LIMITS = {"open": (0.95, 4), "plain": (0.97, 15)}  # share of equal top tokens; answers equal over 16 tokens
GREEDY, DRAWN = {"open": 16, "plain": 40}, {"open": 10, "plain": 30}  # tokens of an answer; plain ones end early
LEAST = {"open": 250, "plain": 1000}  # positions


@dataclass
class Written:
    """What llama.cpp wrote after a prompt, and its top token with its log-probability at each of those positions."""

    prompt: list[int]
    tokens: list[int]
    top: list[int]
    logprob: list[float]


@pytest.fixture(scope="module", params=["open", "plain"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def prompts(smollm2_ours: oracle.Ours, kind: str) -> list[list[int]]:
    questions = {"open": OPEN, "plain": PLAIN}[kind]
    turns = (f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in questions)
    return [smollm2_ours.base.tokenizer.encode(text) for text in turns]


@pytest.fixture(scope="module")
def written(smollm2: Path, prompts: list[list[int]], kind: str) -> tuple[list[Written], list[Written]]:
    """(greedy, drawn) answers to every prompt."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(smollm2)
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
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
        tops = [s["top_logprobs"][0] for s in steps]
        return Written(prompt, [s["id"] for s in steps], [t["id"] for t in tops], [t["logprob"] for t in tops])

    pairs = [(write(p, GREEDY[kind], i, 0.0), write(p, DRAWN[kind], i, 0.8)) for i, p in enumerate(prompts)]
    return [greedy for greedy, _ in pairs], [drawn for _, drawn in pairs]


def test_top_tokens(smollm2_ours: oracle.Ours, written: tuple[list[Written], list[Written]], kind: str) -> None:
    agreed, gaps, noise = [], [], []
    for answers in written:
        ours = log_probabilities(smollm2_ours, answers)
        top = torch.tensor([t for w in answers for t in w.top])
        of_theirs = ours.gather(1, top[:, None])[:, 0]
        agreed.append((ours.argmax(-1) == top).float())
        gaps.append(ours.max(-1).values - of_theirs)
        noise.append(of_theirs - torch.tensor([p for w in answers for p in w.logprob]))
    share, count = torch.cat(agreed).mean(), sum(map(len, agreed))
    gap, spread = torch.cat(gaps).max(), torch.cat(noise).std()
    print(f"same top token: {share:.4f} of {count} (greedy {agreed[0].mean():.4f}, drawn {agreed[1].mean():.4f})")
    print(f"largest gap where it differs {gap:.2f}; top token's log-probability differs by {spread:.3f} (std)")
    wandered = sum(t != top for w in written[1] for t, top in zip(w.tokens, w.top, strict=True))
    assert count >= LEAST[kind] and wandered > 0.05 * LEAST[kind], "the drawn texts must leave the greedy path"
    assert share >= LIMITS[kind][0]
    assert gap < 1 and spread < 0.1  # where they differ it is between near-equals: 0.17 and 0.045 measured on PLAIN


def log_probabilities(ours: oracle.Ours, answers: list[Written]) -> torch.Tensor:
    """Ours over the vocabulary where each token of the answers was written, all answers packed into one forward."""
    rows, at = [], 0
    for w in answers:
        first = at + len(w.prompt) - 1
        rows.append(torch.arange(first, first + len(w.tokens)))
        at += len(w.prompt) + len(w.tokens)
    lengths = tuple(len(w.prompt) + len(w.tokens) for w in answers)
    run = ours.decoder.begin(torch.cat([torch.arange(n) for n in lengths]), PackedDocuments.of(lengths), adapted=False)
    tokens = torch.tensor([t for w in answers for t in (*w.prompt, *w.tokens)])
    with torch.no_grad():
        x = ours.decoder.hidden(tokens, run, torch.cat(rows))
        return torch.log_softmax(ours.decoder.logits(x, adapted=False), -1)


def test_first_greedy_tokens(
    smollm2_ours: oracle.Ours, prompts: list[list[int]], written: tuple[list[Written], list[Written]], kind: str
) -> None:
    stops = smollm2_ours.base.tokenizer.stop_ids
    got = generate(smollm2_ours.decoder, prompts, Sampling(max_new_tokens=16), stops, adapted=False)
    same = sum(g == [t for t in w.tokens[:16] if t not in stops] for g, w in zip(got, written[0], strict=True))
    print(f"same first 16 tokens: {same} of {len(prompts)}")
    assert same >= LIMITS[kind][1]
