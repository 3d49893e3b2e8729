"""Evaluations of reinforcement learning: one sampled answer to each held-out prompt, and the rewards, before the first
step, every `eval_every` steps, after each epoch and at the end. Answers are sampled as in training: the reward is the
one that is trained. It chooses the best checkpoint and the early stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from graftune.data.prompts import PromptRow
from graftune.rl.rewards import Rewarded, Rewards
from graftune.rl.rounds import answer_figures
from graftune.session import Sample, Session
from graftune.step.evaluate import EvalResult
from graftune.training.evaluation import Evaluation
from graftune.training.hooks import RunState

NAME = "reward"


class HeldOut(Evaluation):
    def __init__(self, session: Session, prompts: Sequence[PromptRow], rewards: Rewards):
        super().__init__(())
        self.session, self.prompts, self.rewards, self.name = session, prompts, rewards, NAME

    def run(self, state: RunState) -> None:
        p, report, settings = state.progress, state.report, state.config.rl
        report.phase("evaluating")
        with (
            report.console.working(f"answering {len(self.prompts)} held-out prompts"),
            state.pausing_steps("evaluate"),
            state.stop.interruptible(),
        ):
            groups = self.session.sample(
                [prompt.messages for prompt in self.prompts],
                max_new_tokens=settings.answer_tokens,
                temperature=state.config.train.temperature,
                seed=state.config.train.seed,
                logprobs=False,
            )
        answers = [group[0] for group in groups]
        rewarded = self.rewards(self.prompts, [[answer.text] for answer in answers], state.check_stop)
        figures = answer_figures(answers, rewarded)
        self._report(state, answers, rewarded, figures)
        p.last_eval = p.step
        self._choose(state, None, figures.get(NAME), int(figures.get("reward_failed", 0)))
        result = EvalResult(math.nan, None, sum(len(answer.tokens) for answer in answers), len(answers))
        for hook in state.hooks:
            hook.evaluated(state, result)
        state.check_stop()

    def close(self, state: RunState) -> None:
        self.rewards.close()

    def _report(
        self, state: RunState, answers: Sequence[Sample], rewarded: Rewarded, figures: dict[str, float]
    ) -> None:
        p, report = state.progress, state.report
        facts: dict[str, Any] = {"metric_records": len(answers)}
        if problems := list(rewarded.problems.values()):
            facts |= {"metric_failed": int(figures["reward_failed"]), "metric_error": problems[0]}
            report.warn(f"held-out prompts at step {p.step}: {'; '.join(problems)}", p.step)
        report.log.emit("eval", step=p.step, epoch=p.epoch, loss=None, metrics=figures, **facts)
        shown = ", ".join(f"{name.replace('_', ' ')} {round(value, 3):,}" for name, value in figures.items())
        report.console.note(f"held-out prompts at step {p.step}: {shown}")
        few = state.config.run.samples
        if few:
            texts = {"prompts": [prompt.asked for prompt in self.prompts[:few]], "references": []}
            report.log.emit("sample", step=p.step, answers=[one.text for one in answers[:few]], shown=few, **texts)
