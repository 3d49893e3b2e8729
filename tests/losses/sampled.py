"""The cases of the comparison with TRL's GRPOTrainer: for the losses the models of preferred.py, and sampled answers
whose advantages and log-probabilities are numbers of numpy's generator; for the advantages, answers that are texts of
numbers, which the functions of given_rewards.py read. tools/store_policy.py lets TRL compute and writes tests/fixtures;
test_policy.py and tests/rl compare."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from graftune.batch import Example
from tests.support import tiny

STORED = Path(__file__).parents[1] / "fixtures" / "policy.json"
GRADS = STORED.with_suffix(".safetensors")  # of every LoRA weight, named family/case/weight
FUNCTIONS = Path(__file__).with_name("given_rewards.py")
WEIGHTS = {"first": 1.0, "second": 0.25}  # of the reward functions
SCALES = ("group", "none")
# The settings of each case, and TRL's name of the loss and of its limits.
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "ppo", "divide": "answers", "clip_low": 0.3, "clip_high": 0.4},
    "dapo": {"loss": "ppo", "temperature": 0.7},
    "dr_grpo": {"loss": "ppo", "divide": "constant", "divide_by": 20.0},
    "cispo": {"loss": "cispo", "clip_high": 0.5},
    "cispo, sequence": {"loss": "cispo", "clip_high": 0.1, "ratios": "sequence"},
    "grpo, sequence": {"loss": "ppo", "divide": "answers", "ratios": "sequence"},
    "dapo, kl": {"loss": "ppo", "kl": 0.3, "temperature": 1.3},
    "importance_sampling": {"loss": "importance_sampling"},
}


def answers(count: int = 7) -> list[Example]:
    """Prompts and answers of other lengths; the first answer has the same advantage at every token."""
    draw, made = np.random.default_rng(9), list[Example]()
    for place in range(count):
        prompt, answer = (draw.integers(3, tiny.VOCAB, draw.integers(2, 9)).tolist() for _ in range(2))
        total = len(prompt) + len(answer)
        advantages = (draw.integers(-20, 21, total) / 8).tolist()
        logprobs = (-5.0 + draw.integers(-9, 10, total) / 8).tolist()
        numbers = {"advantages": 1.25 if place == 0 else advantages, "logprobs": logprobs}
        supervised = [False] * len(prompt) + [True] * len(answer)
        made.append(Example(prompt + answer, supervised, place, numbers=numbers))
    return made


def rewarded_answers(groups: int = 6, size: int = 5) -> list[list[str]]:
    """Groups of answers. In the first all rewards are equal; elsewhere one function or both give no reward to some."""
    draw = np.random.default_rng(10)

    def answer(group: int) -> list[float | None]:
        first, second = (draw.integers(-40, 41, 2) / 8).tolist() if group else (1.5, -2.0)
        skipped = draw.integers(0, 6) if group > 1 else 9
        return [None if skipped in (0, 2) else first, None if skipped in (1, 2) else second]

    return [[json.dumps(answer(group)) for _ in range(size)] for group in range(groups)]


@cache
def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text())
