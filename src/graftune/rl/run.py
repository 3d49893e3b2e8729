"""The loop of reinforcement learning, over the verbs of a session:

    groups = session.sample(prompts, n=8)          rounds.draw
    rewards = functions(prompts, groups)
    session.forward_backward(examples)             with advantages and sampled log-probabilities
    session.optim_step()

Evaluations, checkpoints, checks of the numbers and trackers are the hooks of every run. A round is one or several
steps; one in which every group's rewards are equal changes nothing, and its steps are counted all the same.

An evaluation samples one answer to each held-out prompt, before the first step, every `eval_every` steps, after each
epoch and at the end. Answers are sampled as in training, so that the mean reward is the one that training raises. It
chooses the best checkpoint and the early stop.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from graftune.data.prompts import PromptRow
from graftune.observe.console import Console
from graftune.observe.events import Event, latest
from graftune.rl import rounds
from graftune.rl.prepare import PreparedRl
from graftune.rl.rewards import Rewarded, Rewards
from graftune.rl.rounds import Round, RoundPlan, answer_figures
from graftune.session import Sample, Session
from graftune.step.evaluate import EvalResult
from graftune.step.pipeline import Figures
from graftune.step.schedule import learning_rate
from graftune.training.evaluation import Evaluation
from graftune.training.guard import Guard
from graftune.training.hooks import Hook, RunState
from graftune.training.resume import write_start
from graftune.training.run import Callback, Run
from graftune.weights import checkpoint

# Figures of a round, logged with its first update only, because the summary adds them up.
ONCE = ("sample_s", "reward_s", "skipped_groups", "reward_failed")
REWARD = "reward"
PHASES = {"sample_s": "sampling", "reward_s": "rewards", "train_s": "training"}


class PolicyRun(Run):
    def __init__(self, prepared: PreparedRl, console: Console, callbacks: Sequence[Callback] = ()):
        self.prepared, self.session, self.evaluates = prepared, prepared.session, bool(prepared.data.held_out)
        config = prepared.parts.config
        settings = config.rl
        self.plan = RoundPlan(
            len(prepared.data.training), settings.prompts_per_round, settings.updates_per_round, config.train.seed
        )
        digests = prepared.data.data_sha256, prepared.data.prompts_sha256
        super().__init__(prepared, console, callbacks, self.plan.steps_per_epoch, digests)
        self.guard = Guard(None, self.checkpoints, config.run.max_skipped, config.run.stop_on_warning)
        evaluation = [HeldOut(self.session, prepared.data.held_out, prepared.rewards)] if prepared.data.held_out else []
        self.state.hooks = [*evaluation, PhaseTimes(), self.checkpoints, self.guard]
        self.reported: set[str] = set()  # why answers had no reward

    def start(self) -> None:
        write_start(self.state, len(self.prepared.data.training), self.prepared.plan, self.checkpoints.identity)

    def _epoch(self) -> None:
        state, p, updates = self.state, self.state.progress, self.plan.updates
        while not state.epoch_ends and not self._ended():
            drawn = self._drawn(p.epoch_step // updates, p.epoch_step % updates)
            for _ in range(p.epoch_step % updates, updates):
                self._update(drawn)
                self._run_due()
                if self._ended():
                    return

    def _drawn(self, number: int, done: int) -> Round:
        """The next round; after a resume, the one of which `done` updates have been made."""
        state, p, prepared = self.state, self.state.progress, self.prepared
        found = Round.load(state.folder, p.step - done)
        if found is None:
            if done:  # a damaged checkpoint was passed over, or the file was deleted
                text = f"{rounds.FILE} does not hold the answers of step {p.step + 1}: they are sampled anew"
                state.report.warn(text, p.step)
            chosen = [prepared.data.training[place] for place in self.plan.chosen(p.epoch, number)]
            state.report.phase("sampling")
            with state.stop.interruptible():
                seed = self.plan.seed_of(p.epoch, number)
                how = self.session, self.parts.config, chosen, prepared.rewards, state.check_stop
                found = rounds.draw(*how, step=p.step - done, seed=seed, show=self._show)
            found.save(state.folder, self.plan.updates, checkpoint.steps(self.checkpoints.folder))
        if not done:  # a resume within the round keeps the logged answers; one at its start has discarded them
            state.report.log.emit("answers", step=p.step + 1, **found.shown)
            self._report_failures(found)
        return found

    def _show(self, activity: str) -> None:
        self.state.report.bar.activity = activity

    def _report_failures(self, found: Round) -> None:
        """Warn of each reason once. Every step logs how many answers have no reward."""
        for reason, text in found.failed.items():
            if reason not in self.reported and len(self.reported) < 20:
                self.reported.add(reason)
                step = self.state.progress.step + 1
                self.state.report.warn(f"step {step}: {text}; answers without a reward are not trained", step)

    def _update(self, drawn: Round) -> None:
        """One optimizer step over all answers of a round."""
        state, report, p, session = self.state, self.state.report, self.state.progress, self.session
        lr, began, figures = learning_rate(p.step, state.total, self.parts.config.optim), time.perf_counter(), _NOTHING
        tokens = responses = 0
        report.sending()
        session.steps = p.step
        if drawn.examples:
            state.check_stop()
            session.forward_backward(drawn.examples)
            stats = session.optim_step(lr=lr)
            figures, tokens, responses = stats.fetched(), stats.tokens, stats.response_tokens
        seconds = time.perf_counter() - began
        facts: dict[str, Any] = {"step": p.step + 1, "epoch": p.epoch, "lr": lr, "tokens": tokens}
        once = ONCE if p.epoch_step % self.plan.updates else ()
        facts |= {"response_tokens": responses, "train_s": seconds}
        facts |= {name: value for name, value in drawn.figures.items() if name not in once}
        p.step, p.epoch_step = p.step + 1, p.epoch_step + 1
        report.host_seconds.append(seconds)
        report.sent(self.parts, p.step)
        self._take(figures._replace(tag=facts))


_NOTHING = Figures(None, 0.0, 0.0, False, 0.0, 0.0, {})  # of a step without answers to train on


class PhaseTimes(Hook):
    """Adds up the seconds of sampling, rewards and training, and the groups skipped, for the run's summary."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()

    def resumed(self, state: RunState, events: Sequence[Event]) -> None:
        for event in latest([*events], "step"):  # a step that was done again counts once
            if event["step"] <= state.progress.step:
                self._add(event)

    def step_done(self, state: RunState, figures: Figures) -> None:
        self._add(figures.tag)

    def finish(self, state: RunState) -> dict[str, Any]:
        total = sum(self.sums[name] for name in PHASES) or 1.0
        shares = ", ".join(f"{what} {self.sums[name] / total:.0%}" for name, what in PHASES.items())
        skipped, failed = int(self.sums["skipped_groups"]), int(self.sums["reward_failed"])
        more = f"; {failed} answers without a reward" if failed else ""
        state.report.console.note(f"time: {shares}; groups skipped because their rewards were equal: {skipped}{more}")
        return {
            "seconds": {what: self.sums[name] for name, what in PHASES.items()},
            "skipped_groups": skipped,
            "reward_failed": failed,
        }

    def _add(self, facts: dict[str, Any]) -> None:
        for name in (*PHASES, "skipped_groups", "reward_failed"):
            self.sums[name] += facts.get(name) or 0


class HeldOut(Evaluation):
    def __init__(self, session: Session, prompts: Sequence[PromptRow], rewards: Rewards):
        super().__init__(())
        self.session, self.prompts, self.rewards, self.name = session, prompts, rewards, REWARD

    def _measured(self, state: RunState) -> EvalResult:
        settings = state.config.rl
        with (
            state.report.console.progress(len(self.prompts), label="answering held-out prompts", unit="answers") as bar,
            state.pausing_steps("evaluate"),
            state.stop.interruptible(),
        ):
            groups = self.session.sample(
                [prompt.messages for prompt in self.prompts],
                max_new_tokens=settings.answer_tokens,
                temperature=state.config.train.temperature,
                seed=state.config.train.seed,
                logprobs=False,
                on_progress=bar.update,
            )
        answers = [group[0] for group in groups]
        rewarded = self.rewards(self.prompts, [[answer.text] for answer in answers], state.check_stop)
        figures = answer_figures(answers, rewarded)
        self._report(state, answers, rewarded, figures)
        self._choose(state, None, figures.get(REWARD), int(figures.get("reward_failed", 0)))
        return EvalResult(math.nan, None, sum(len(answer.tokens) for answer in answers), len(answers))

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
