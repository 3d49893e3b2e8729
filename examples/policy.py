"""Policy gradients in a loop of your own: sample answers, reward them, train on what was better than the group's mean.

    python examples/policy.py

The reward here is a toy: the share of words that begin with an s. Put in your own. The batches are tokenised by the
loop; on CUDA they replay from one graph, whatever their lengths. docs/preferences.md says what a policy loss reads.
"""

from __future__ import annotations

import graftune

BASE = ""  # the bundled SmolLM2-135M-Instruct
ROUNDS, GROUP, NEW_TOKENS = 14, 8, 10
PROMPTS = ["On Sunday we", "The old sailor", "In the shop there", "My sister said that"]


def reward(text: str) -> float:
    words = text.lower().split()
    return sum(word.startswith("s") for word in words) / max(1, len(words))


def example(prompt: list[int], sample: graftune.Sample, advantage: float) -> dict[str, object]:
    """Numbers per token. Those of the prompt are not trained; the token that ended the answer is."""
    tokens, logprobs = list(sample.tokens), list(sample.sampling_logprobs or ())
    if sample.end is not None:
        tokens.append(sample.end.id)
        logprobs.append(sample.end.sampling_logprob)
    return {
        "tokens": prompt + tokens,
        "mask": [0] * len(prompt) + [1] * len(tokens),
        "logprobs": [0.0] * len(prompt) + logprobs,
        "advantages": advantage,  # the same for all tokens of the answer
    }


with graftune.open(BASE, loss="ppo", lr=1e-3, seed=1) as session:
    prompts = [session.tokenizer.encode(prompt, add_special=True) for prompt in PROMPTS]
    history = []
    for number in range(ROUNDS):
        batch, rewards = [], []
        drawn = session.sample(PROMPTS, n=GROUP, max_new_tokens=NEW_TOKENS, temperature=1.0, seed=number)
        for prompt, samples in zip(prompts, drawn, strict=True):
            scores = [reward(sample.text) for sample in samples]
            mean = sum(scores) / len(scores)
            batch += [example(prompt, one, score - mean) for one, score in zip(samples, scores, strict=True)]
            rewards += scores
        session.forward_backward(batch)
        stats = session.optim_step()  # a second update on the same answers would repeat these two calls
        history.append(sum(rewards) / len(rewards))
        print(f"round {number + 1}: reward {history[-1]:.3f}, ratio {stats.figures['ratio']:.3f}", flush=True)
