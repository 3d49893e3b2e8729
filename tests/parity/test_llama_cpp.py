"""The default base against llama.cpp on the same file: not our formulas in another spelling but another program.

llama.cpp rounds activations to 8 bits, so logits cannot be equal; the token they pick nearly always is. It writes an
answer greedily and one drawn at temperature 0.8, so that it leaves the well-trodden path; it names its top token at
each position, and we are led along the same text and name ours. The two answers share a prompt, which llama.cpp then
reads once. It takes 23 ms a token, so a few of PLAIN are asked; GRAFTUNE_EXAMPLES=1000 asks all, which are
1,000 positions of PLAIN.
"""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from graftune.infer.sample import Sampling
from graftune.model.decoder import PackedDocuments
from tests.support import oracle
from tests.support.generate import generate
from tests.support.thorough import THOROUGH

# Two sets of prompts, and both are judged. OPEN is the one we started with. SmolLM2 is so often undecided on it that
# llama.cpp does not agree with itself: a key cache in fp32 without flash attention instead of its default changes 3.2%
# of its top tokens and 7 of 20 answers. We measured 96.8% to 97.0% and 15 of 20 against the default, 96.5% and 10 of
# 20 against the other, so its limits below allow for that noise; of those twenty questions every second one is listed
# here. PLAIN was chosen after that, for being decided: one likely answer, code, sentences to copy. It is the easier
# set, and holds the full limits: 98.7% and 19 of 20 on one CPU, 98.1% and 16 of 20 on
# another.
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
# Share of equal top tokens; of answers equal over FIRST tokens. The few questions of a quick run allow for more noise.
LIMITS = {"open": (0.95, 0.4), "plain": (0.97, 0.75)} if THOROUGH else {"plain": (0.95, 0.5)}
GREEDY = {"open": 16, "plain": 40 if THOROUGH else 10}  # tokens of an answer; plain ones end early
DRAWN = {"open": 10, "plain": 30 if THOROUGH else 16}
LEAST = {"open": 250, "plain": 1000 if THOROUGH else 60}  # positions
FIRST = 16 if THOROUGH else 10  # tokens of our own greedy answers


@dataclass
class Written:
    """What llama.cpp wrote after a prompt, and its top token with its log-probability at each of those positions."""

    prompt: list[int]
    tokens: list[int]
    top: list[int]
    logprob: list[float]


@pytest.fixture(scope="module")
def prompts(smollm2_ours: oracle.Ours) -> dict[str, list[list[int]]]:
    asked = {"open": OPEN, "plain": PLAIN} if THOROUGH else {"plain": PLAIN[::7]}
    encode = smollm2_ours.base.tokenizer.encode
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return {kind: [encode(turn.format(question)) for question in questions] for kind, questions in asked.items()}


@pytest.fixture(scope="module")
def written(smollm2: Path, prompts: dict[str, list[list[int]]]) -> dict[str, tuple[list[Written], list[Written]]]:
    """(greedy, drawn) answers to every prompt of a kind."""
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

    def answers(kind: str) -> tuple[list[Written], list[Written]]:
        asked = enumerate(prompts[kind])
        pairs = [(write(p, GREEDY[kind], i, 0.0), write(p, DRAWN[kind], i, 0.8)) for i, p in asked]
        return [greedy for greedy, _ in pairs], [drawn for _, drawn in pairs]

    return {kind: answers(kind) for kind in prompts}


@pytest.mark.parametrize("kind", LIMITS)
def test_top_tokens(
    smollm2_ours: oracle.Ours, written: dict[str, tuple[list[Written], list[Written]]], kind: str
) -> None:
    greedy, drawn = written[kind]
    answers = [*greedy, *drawn]
    ours = log_probabilities(smollm2_ours, answers)
    top = torch.tensor([t for w in answers for t in w.top])
    of_theirs = ours.gather(1, top[:, None])[:, 0]
    agreed, count = ours.argmax(-1) == top, len(top)
    gap = (ours.max(-1).values - of_theirs).max()
    spread = (of_theirs - torch.tensor([p for w in answers for p in w.logprob])).std()
    print(f"{kind}: same top token: {agreed.float().mean():.4f} of {count}")
    print(f"largest gap where it differs {gap:.2f}; top token's log-probability differs by {spread:.3f} (std)")
    wandered = sum(t != top for w in drawn for t, top in zip(w.tokens, w.top, strict=True))
    assert count >= LEAST[kind] and wandered > 0.05 * LEAST[kind], "the drawn texts must leave the greedy path"
    assert agreed.float().mean() >= LIMITS[kind][0]
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
    smollm2_ours: oracle.Ours,
    prompts: dict[str, list[list[int]]],
    written: dict[str, tuple[list[Written], list[Written]]],
) -> None:
    """Of our own generation, over its cache; all questions at once, for a step costs little more with many."""
    stops = smollm2_ours.base.tokenizer.stop_ids
    asked = [(kind, w) for kind, (greedy, _) in written.items() for w in greedy]
    got = generate(
        smollm2_ours.decoder, [w.prompt for _, w in asked], Sampling(max_new_tokens=FIRST), stops, adapted=False
    )
    for kind in written:
        same = [
            answer == [t for t in w.tokens[:FIRST] if t not in stops]
            for answer, (of, w) in zip(got, asked, strict=True)
            if of == kind
        ]
        print(f"{kind}: same first {FIRST} tokens: {sum(same)} of {len(same)}")
        assert sum(same) >= LIMITS[kind][1] * len(same)
