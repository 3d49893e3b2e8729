"""Evaluations of a run: before the first step, every `eval_every` steps, after each epoch and at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from graftune.batch import Example
from graftune.training.hooks import Hook, RunState


class Evaluation(Hook):
    """Measures the validation loss, keeps count of the best one, and lets the other hooks know."""

    def __init__(self, examples: Sequence[Example]):
        self.examples = examples

    def due(self, state: RunState) -> bool:
        p, every = state.progress, state.config.train.eval_every
        if p.last_eval == p.step:
            return False
        ends = state.epoch_ends or p.step >= state.total
        return p.step == 0 or ends or (every > 0 and p.step % every == 0)

    def run(self, state: RunState) -> None:
        p, report = state.progress, state.report
        report.phase("evaluating")
        counted = report.counted("validating", len(self.examples), "examples", state.check_stop_alone)
        with state.pausing_steps("evaluate"), counted as count, state.stop.interruptible():
            result = state.parts.evaluated(self.examples, on_progress=count)
        report.evaluation(result, p.step, p.epoch)
        p.last_eval = p.step
        if p.step == 0:
            p.first_loss = result.loss if math.isfinite(result.loss) else None  # as in the log
        elif math.isfinite(result.loss) and (p.best_loss is None or result.loss < p.best_loss):
            p.best_loss, p.best_step, p.stale = result.loss, p.step, 0
        else:
            p.stale += 1
        for hook in state.hooks:
            hook.evaluated(state, result)
        state.stop.signal = max(state.ranks.gather(state.stop.signal))  # all ranks stop, or none
        state.check_stop()
