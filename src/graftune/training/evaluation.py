"""Evaluations of a run: before the first step, every `eval_every` steps, after each epoch and at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from graftune.batch import Example
from graftune.data.encoded import unit_of
from graftune.step.evaluate import EvalResult
from graftune.training.hooks import Hook, RunState
from graftune.training.metric import Metric, Scores
from graftune.weights.checkpoint import Progress


class Evaluation(Hook):
    """Measures the validation loss and the metric, keeps count of the best step, and lets the other hooks know."""

    saves_before = True

    def __init__(self, examples: Sequence[Example], metric: Metric | None = None):
        self.examples, self.metric = examples, metric
        self.name = ""  # of the figure that chooses the best step, if it is not the loss
        self.cut_reported = False

    def due(self, state: RunState) -> bool:
        p, every = state.progress, state.config.train.eval_every
        if p.last_eval == p.step:
            return False
        ends = state.epoch_ends or p.step >= state.total
        return p.step == 0 or ends or (every > 0 and p.step % every == 0)

    def run(self, state: RunState) -> None:
        state.report.phase("evaluating")
        result = self._measured(state)
        state.progress.last_eval = state.progress.step
        for hook in state.hooks:
            hook.evaluated(state, result)
        state.stop.signal = max(state.ranks.gather(state.stop.signal))  # all ranks stop, or none
        state.check_stop()

    def _measured(self, state: RunState) -> EvalResult:
        """Evaluate, report the figures, and compare them with the best so far."""
        with state.counting("evaluate", "validating", len(self.examples), unit_of(self.examples)) as count:
            result = state.parts.evaluated(self.examples, on_progress=count)
        scores = None if self.metric is None else self._scores(state, self.metric)
        state.report.evaluation(result, state.progress.step, state.progress.epoch, scores)
        if scores is not None:
            self._report_faults(state, scores)
        self._count(state, result, scores)
        return result

    def finish(self, state: RunState) -> dict[str, Any]:
        p = state.progress
        if not self.name:
            return {}
        failed = {"failed": p.best_failed} if p.best_failed else {}
        return {"metric": {"name": self.name, "start": p.first_metric, "best": p.best_metric} | failed}

    def close(self, state: RunState) -> None:
        if self.metric is not None:
            self.metric.close()

    def _count(self, state: RunState, result: EvalResult, scores: Scores | None) -> None:
        run = state.config.run
        if run.best != "loss":
            self.name, goal = run.best, "max" if state.parts.loss.better[run.best] == "higher" else "min"
            self._choose(state, result.loss, result.figures[run.best], goal=goal)
        elif scores is not None:
            self._choose(state, result.loss, scores.value, scores.failed, run.metric_goal)
        else:
            self._choose(state, result.loss, None)

    def _choose(
        self, state: RunState, loss: float | None, value: float | None, failed: int = 0, goal: str = "max"
    ) -> None:
        """Compare this step with the best one so far. `value`: the figure that chooses, if it is not the loss."""
        p = state.progress
        measured = [number for number in (loss, value) if number is not None]
        usable = bool(measured) and all(map(math.isfinite, measured))
        if p.step == 0:
            p.first_loss = loss if loss is not None and math.isfinite(loss) else None  # as in the log
            p.first_metric = value if value is not None and math.isfinite(value) else None
        elif usable and is_better(p, loss, value, failed, goal):
            p.best_loss, p.best_step, p.stale = loss, p.step, 0
            p.best_metric, p.best_failed = value, failed
        else:
            p.stale += 1

    def _scores(self, state: RunState, metric: Metric) -> Scores:
        """Rank 0 answers and calls the metric. Where every forward pass needs all ranks, all of them answer."""
        answers, label = [], "answering held-out prompts"
        if state.ranks.leads or state.together:
            counting = state.counting("metric", label, len(metric.questions), "answers")
            with state.ranks.busy(label), counting as count:
                answers = metric.answers(state.parts, adapted=True, between=count)
                state.parts.free_cache()
        with state.ranks.busy("computing the metric"), state.pausing_steps("metric"):
            return Scores(**state.ranks.from_lead(lambda: asdict(metric.scores(answers, state.check_stop_alone))))

    def _report_faults(self, state: RunState, scores: Scores) -> None:
        step, report = state.progress.step, state.report
        self.name = next(iter(scores.means), self.name)
        if scores.failed:
            rule = "a step with fewer failed calls counts as better"
            report.warn(f"step {step}: {scores.failures}; {rule}", step)
        if scores.cut and not self.cut_reported:
            self.cut_reported = True
            report.console.note(f"{scores.cut} of {scores.records} answers were cut off at sample_tokens")


def is_better(best: Progress, loss: float | None, value: float | None, failed: int, goal: str) -> bool:
    """Whether an evaluation is better than the best so far: first by fewer failed metric calls, since a mean over fewer
    answers may be that of the easy ones; then by the metric; then by the loss, if the metric is equal or absent."""
    if best.best_step < 0 or (value is not None and best.best_metric is None):
        return True
    sign = 1 if goal == "max" else -1

    def order(failed: int, value: float | None, loss: float | None) -> tuple[float, float, float]:
        return -failed, sign * (value or 0.0), -(loss or 0.0)

    return order(failed, value, loss) > order(best.best_failed, best.best_metric, best.best_loss)
