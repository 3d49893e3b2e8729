"""Rewards of answers, by functions of the user's, as TRL has them.

    def reward(prompts, completions, **columns): ...      # a number or None for each completion; plain or async

Each function runs in a process of its own with a time limit (training/user_function.py) and gets all answers of a round
in one call. If that call raises or returns too few numbers, it is called again group by group, so that only the groups
that it cannot handle are lost. (Groups of one answer are not tried again after a wrong number of rewards: a function
that always returns one number would pass.) None means that the function does not apply to an answer; the others then
decide alone. A number that is not finite, and a call that fails, leave the answer without a reward, as does None from
every function: it is not trained, and counted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from graftune.data.prompts import PromptRow
from graftune.data.summary import counted
from graftune.errors import GraftuneError, one_line
from graftune.settings.sections import RlConfig
from graftune.training.user_function import Between, CallFailed, FunctionName, UserFunction

EPSILON = 1e-4  # added to the standard deviation, as TRL does
GIVEN = ("prompts", "completions")  # what every function is given, beside the columns of the data
FIGURES = ("std", "s", "failed")  # names not free for functions: reward_std and so on are figures of all rewards


@dataclass
class Rewarded:
    """Rewards of the answers of a round, in their order."""

    totals: list[float | None]  # weighted sums; None: a function failed, or none applies
    by_function: dict[str, list[float | None]]
    failed: dict[str, int] = field(default_factory=dict)  # answers that each function failed for
    errors: dict[str, str] = field(default_factory=dict)  # the first error of each
    inapplicable: int = 0  # answers for which every function returned None

    @property
    def problems(self) -> dict[str, str]:
        """Why answers have no reward, and a sentence with their number."""
        found = {
            f"{name}: {why}": f"the reward {name} failed for {counted(self.failed[name], 'answer')}: {why}"
            for name, why in self.errors.items()
        }
        if self.inapplicable:
            found["None"] = f"no reward function gave a number for {counted(self.inapplicable, 'answer')}"
        return found

    @property
    def means(self) -> dict[str, float]:
        """The mean reward of each function, over the answers that it applies to."""
        found = {name: [one for one in values if one is not None] for name, values in self.by_function.items()}
        return {name: statistics.fmean(values) for name, values in found.items() if values}


class Rewards:
    def __init__(self, settings: RlConfig):
        names = [FunctionName.of(text) for text in settings.reward]
        counts = {one.name: sum(other.name == one.name for other in names) for one in names}
        self.weights: dict[str, float] = {}
        self.functions: dict[str, UserFunction] = {}
        for one in names:
            alone = counts[one.name] == 1 and one.name not in FIGURES
            name = one.name if alone else f"{one.path.stem}.{one.name}"
            if name in self.functions:
                raise GraftuneError(f"the reward {name} is given twice", fix="give it once, with a weight")
            self.weights[name] = one.weight
            self.functions[name] = UserFunction(one, settings.reward_seconds, "reward")

    def check(self) -> None:
        """Refuse functions that cannot be imported. Their processes keep running."""
        for name, function in self.functions.items():
            function.check(name)

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse functions whose parameters without a default are no columns of the data. Call `check` first."""
        for name, function in self.functions.items():
            missing = [one for one in function.needed if one not in (*GIVEN, *columns)]
            if missing:
                there = ", ".join(columns) or "none"
                raise GraftuneError(
                    f"the reward {name} takes {' and '.join(missing)}, which the data does not have",
                    where=str(function.path),
                    fix=f"take columns of the data ({there}), or give the parameter a default",
                )

    def close(self) -> None:
        for function in self.functions.values():
            function.close()

    def __call__(self, prompts: Sequence[PromptRow], answers: Sequence[Sequence[str]], between: Between) -> Rewarded:
        """Compute the rewards of all answers, given by prompt. `between` is called while the functions compute."""
        total = sum(map(len, answers))
        found = Rewarded([None] * total, {})
        unusable: set[int] = set()
        for name, function in self.functions.items():
            function.hangs = 0
            values, bad = _called(function, prompts, answers, between)
            found.by_function[name] = values
            unusable |= bad.keys()
            if bad:
                found.failed[name], found.errors[name] = len(bad), one_line(next(iter(bad.values())), longest=300)
        for place in range(total):
            parts = {name: values[place] for name, values in found.by_function.items()}
            known = [self.weights[name] * value for name, value in parts.items() if value is not None]
            if known and place not in unusable:
                found.totals[place] = math.fsum(known)
        found.inapplicable = found.totals.count(None) - len(unusable)
        return found


def _called(
    function: UserFunction,
    prompts: Sequence[PromptRow],
    answers: Sequence[Sequence[str]],
    between: Between,
) -> tuple[list[float | None], dict[int, str]]:
    """The numbers of one function, and why it has none for some answers, by place."""
    try:
        found = function(_arguments(prompts, answers), between)
        return found["numbers"], {int(place): why for place, why in found["bad"].items()}
    except CallFailed as error:
        if len(prompts) == 1 or function.hangs or (error.wrong_count and max(map(len, answers), default=0) < 2):
            count = sum(map(len, answers))
            return [None] * count, dict.fromkeys(range(count), str(error))
    values: list[float | None] = []
    bad: dict[int, str] = {}
    for prompt, group in zip(prompts, answers, strict=True):
        start = len(values)
        some, wrong = _called(function, [prompt], [group], between)
        values += some
        bad |= {start + place: why for place, why in wrong.items()}
    return values, bad


def _arguments(prompts: Sequence[PromptRow], answers: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The arguments as TRL passes them: lists of equal length, each prompt repeated; to a conversation's prompt belongs
    a conversation as completion."""
    pairs = [(prompt, text) for prompt, group in zip(prompts, answers, strict=True) for text in group]
    columns = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    given: dict[str, Any] = {name: [prompt.columns.get(name) for prompt, _ in pairs] for name in columns}
    given["prompts"] = [prompt.given for prompt, _ in pairs]
    turns = [[{"role": "assistant", "content": text}] for _, text in pairs]
    given["completions"] = [
        text if isinstance(prompt.given, str) else turn for (prompt, text), turn in zip(pairs, turns, strict=True)
    ]
    return given


def advantages_of(rewards: Sequence[float | None], scale: str) -> list[float | None]:
    """The advantages of one group: the rewards less their mean and, if scaled, over their standard deviation. Empty if
    there is nothing to learn from: all rewards are equal, or fewer than two answers have one."""
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2 or min(known) == max(known):
        return []
    mean = statistics.fmean(known)
    by = statistics.stdev(known) + EPSILON if scale == "group" else 1.0
    return [None if reward is None else (reward - mean) / by for reward in rewards]
