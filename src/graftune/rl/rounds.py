"""A round: prompts, the answers that were sampled to them, their rewards and advantages, and its figures.

It is written to round.json before the first update, so that a run that is stopped or killed between two updates of a
round goes on with the same answers: the weights that sampled them are gone by then. The file also keeps earlier rounds
within which a checkpoint was written. The seed, the round and the weights determine the samples, so a round that was
never written is drawn again with the same answers.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from graftune.arithmetic import ceil_div
from graftune.data.prompts import PromptRow
from graftune.io.files import write_file
from graftune.rl.rewards import Rewarded, Rewards, advantages_of
from graftune.session import Sample, Session
from graftune.settings.config import Config
from graftune.training.user_function import Between

FILE = "round.json"
SHOWN, LONGEST = 2, 2000  # best and worst answers that the log keeps of a round, and characters of each text


@dataclass(frozen=True)
class RoundPlan:
    """The prompts of each round. Every epoch goes through all of them, in a new order."""

    prompts: int
    per_round: int
    updates: int
    seed: int

    def rounds(self) -> int:
        """The number of rounds in an epoch."""
        return ceil_div(self.prompts, self.per_round)

    def steps_per_epoch(self, epoch: int) -> int:
        return self.rounds() * self.updates

    def chosen(self, epoch: int, number: int) -> list[int]:
        order = np.random.default_rng([self.seed, 0x5A3B, epoch]).permutation(self.prompts)
        return order[number * self.per_round : (number + 1) * self.per_round].tolist()

    def seed_of(self, epoch: int, number: int) -> int:
        return (self.seed * 1_000_003 + epoch * self.rounds() + number) % 2**63


@dataclass
class Round:
    step: int  # steps before it
    examples: list[dict[str, Any]]  # tokenised, for the loss
    figures: dict[str, float]  # of its answers, by name, for the log
    shown: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # best and worst answers
    failed: dict[str, str] = field(default_factory=dict)  # `Rewarded.problems`

    def save(self, folder: Path, updates: int, checkpoints: Collection[int]) -> None:
        """Write the round. Of earlier rounds, each of `updates` steps, those are kept within which a checkpoint lies.
        `checkpoints`: their steps."""
        earlier = [one for one in _stored(folder) if one["step"] != self.step]
        kept = [one for one in earlier if any(0 < step - one["step"] < updates for step in checkpoints)]
        write_file(folder / FILE, json.dumps([*kept, asdict(self)]))

    @staticmethod
    def load(folder: Path, step: int) -> Round | None:
        """The stored round that begins after `step` steps, if there is one."""
        return next((Round(**one) for one in _stored(folder) if one["step"] == step), None)


def _stored(folder: Path) -> list[dict[str, Any]]:
    try:
        return list(json.loads((folder / FILE).read_bytes()))
    except (OSError, ValueError):  # it was never written
        return []


def draw(
    session: Session,
    config: Config,
    prompts: Sequence[PromptRow],
    rewards: Rewards,
    between: Between,
    *,
    step: int,
    seed: int,
    show: Callable[[str], None] = lambda text: None,
) -> Round:
    """Answer the prompts, reward the answers and compute the advantages. `between` is called while the functions
    compute, `show` with what is being done, at the end with an empty text; `step`: steps before the round."""
    settings, began = config.rl, time.perf_counter()
    many = len(prompts) * settings.group
    groups = session.sample(
        [prompt.messages for prompt in prompts],
        n=settings.group,
        max_new_tokens=settings.answer_tokens,
        temperature=config.train.temperature,
        seed=seed,
        on_progress=lambda done: show(f"{done} of {many} answers sampled"),
    )
    sampled = time.perf_counter()
    show("rewards are computed")
    rewarded = rewards(prompts, [[one.text for one in group] for group in groups], between)
    show("")
    seconds = {"sample_s": sampled - began, "reward_s": time.perf_counter() - sampled}
    totals = iter(rewarded.totals)
    by_group = [[next(totals) for _ in group] for group in groups]
    advantages = [advantages_of(group, settings.advantage_scale) for group in by_group]
    examples = [
        example_of(tokens, answer, advantage)
        for prompt, group, some in zip(prompts, groups, advantages, strict=True)
        if some
        for tokens in [session.encode(prompt.messages)]
        for answer, advantage in zip(group, some, strict=True)
        if advantage is not None
    ]
    answers = [answer for group in groups for answer in group]
    figures = answer_figures(answers, rewarded) | seconds
    skipped = sum(not some and group.count(None) < len(group) for some, group in zip(advantages, by_group, strict=True))
    drawn = sum(len(answer.tokens) + (answer.end is not None) for answer in answers)
    figures |= {"skipped_groups": skipped, "sample_tok_s": drawn / max(seconds["sample_s"], 1e-9)}
    shown = _shown([prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group], answers, rewarded)
    return Round(step, examples, figures, shown, rewarded.problems)


def example_of(prompt: Sequence[int], answer: Sample, advantage: float) -> dict[str, Any]:
    """An answer as an example for `forward_backward`, its end token included."""
    tokens, logprobs = list(answer.tokens), list(answer.sampling_logprobs or ())
    if answer.end is not None:
        tokens, logprobs = [*tokens, answer.end.id], [*logprobs, answer.end.sampling_logprob]
    return {
        "tokens": [*prompt, *tokens],
        "mask": [0] * len(prompt) + [1] * len(tokens),
        "logprobs": [0.0] * len(prompt) + logprobs,
        "advantages": advantage,
    }


def answer_figures(answers: Sequence[Sample], rewarded: Rewarded) -> dict[str, float]:
    """Rewards and lengths of answers."""
    known = [total for total in rewarded.totals if total is not None]
    figures = {"reward": statistics.fmean(known), "reward_std": statistics.pstdev(known)} if known else {}
    if len(rewarded.by_function) > 1:
        figures |= {f"reward_{name}": mean for name, mean in rewarded.means.items()}
    lengths = [len(answer.tokens) for answer in answers]
    figures |= {"answer_tokens": statistics.fmean(lengths), "longest_answer": max(lengths)}
    figures["truncated"] = statistics.fmean(answer.stopped == "length" for answer in answers)
    if failed := len(rewarded.totals) - len(known):
        figures["reward_failed"] = failed
    return figures


def _shown(
    prompts: Sequence[PromptRow], answers: Sequence[Sample], rewarded: Rewarded
) -> dict[str, list[dict[str, Any]]]:
    """The best and the worst answers, each to another prompt where there are several."""
    rows: list[dict[str, Any]] = [
        {"prompt": prompt.asked[:LONGEST], "answer": answer.text[:LONGEST], "reward": total}
        for prompt, answer, total in zip(prompts, answers, rewarded.totals, strict=True)
        if total is not None
    ]
    found: dict[str, list[dict[str, Any]]] = {}
    for name, sign in (("best", -1.0), ("worst", 1.0)):
        by_prompt = {row["prompt"]: row for row in sorted(rows, key=lambda row: -sign * row["reward"])}
        found[name] = sorted(by_prompt.values(), key=lambda row: sign * row["reward"])[:SHOWN]
    return found
