"""Checks a run's own numbers, from figures that arrive anyway: nothing here waits for the device.

    not finite    updates that were skipped in a row: after `max_skipped` of them the run stops
    loss spike    a loss far above those of the steps before it
    no gradient   a gradient norm of exactly zero, several steps in a row
    tokens        the device counted another number of response tokens than was planned
    not moved     updates were made, and the weights are bit for bit what they were
    worse         a validation loss above the one before the first step

Each of the last five is reported once in a run, as a `warning` event with its kind and on the console; with
`stop_on_warning` the run stops there. All ranks see the same figures and reach the same conclusions. Weights are looked
at where the host has waited for the device, at points that all ranks reach.

fp16 skips updates until its loss scale fits, which takes 16 halvings at most: these do not count.

Skipped updates leave weights and moments untouched, so the state from before the first of them still exists: it is
written as the checkpoint of that step, and checkpoints of the steps since, which hold the same weights, are removed. A
resume then begins before the skipped steps. Where the update before the skipped ones has made a weight that is not
finite (in fp16, one beyond 65504), nothing is written any more, and a resume finds the last checkpoint from before.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graftune.data.encoded import take
from graftune.data.loader import Loader
from graftune.data.pack import pack
from graftune.errors import GraftuneError
from graftune.io.files import remove_at_once
from graftune.kernels.grad_norm.reference import LEAST_SCALE
from graftune.model.context import micro_batch_id
from graftune.observe.events import Event
from graftune.settings.sources import label
from graftune.step.evaluate import EvalResult
from graftune.step.not_finite import first_not_finite
from graftune.step.pipeline import Figures
from graftune.step.tail import bit_sum
from graftune.training.checkpoints import Checkpoints, resume_command
from graftune.training.hooks import Hook, RunState
from graftune.weights import checkpoint

WINDOW, ENOUGH = 50, 20  # steps that a loss is compared with, at most and at least
SPREADS = 6.0  # a spike exceeds the median of the window's losses by more than this many standard deviations (MAD),
LEAST_RISE = 0.5  # by more than this many nats, and by more than the median itself
ZEROS = 3  # steps in a row without a gradient
NOISE = 0.01  # a validation loss above the first by less than this share is noise
SPIKE, NO_GRADIENT, TOKENS, NOT_MOVED, WORSE = "loss_spike", "no_gradient", "tokens", "not_moved", "worse_than_base"
SHOWN = 8  # rows of the data that a message names


class Halted(Exception):
    """The guard stops the run. Every rank raises this at the same step."""


class Guard(Hook):
    def __init__(self, loader: Loader | None, checkpoints: Checkpoints, max_skipped: int, stop_on_warning: bool):
        """`loader`: where the rows of a step are looked up. `max_skipped`: skipped updates in a row after which the run
        stops; 0: never."""
        self.loader, self.checkpoints = loader, checkpoints
        self.max_skipped, self.stop_on_warning = max_skipped, stop_on_warning
        self.reported: set[str] = set()  # kinds of warnings, by this process or before a resume
        self.warning = ""  # the text of the warning that stops the run
        self.skipped = 0  # steps in a row whose update was skipped
        self.first_skipped: dict[str, Any] = {}  # facts of the first of them
        self.ends_not_finite = False  # the final weights are not finite, and no best checkpoint can replace them
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.zeros = 0  # steps in a row without a gradient
        self.last_weights: tuple[int, int, int] | None = None  # step, updates and sum of the bits at the last look

    @property
    def too_many(self) -> bool:
        return 0 < self.max_skipped <= self.skipped

    @property
    def stops(self) -> bool:
        return self.too_many or bool(self.warning)

    def resumed(self, state: RunState, events: Sequence[Event]) -> None:
        kinds = {str(event["kind"]) for event in events if event["event"] == "warning" and "kind" in event}
        self.reported = set(state.ranks.from_lead(lambda: sorted(kinds)))

    def start(self, state: RunState) -> None:
        self._look_at_weights(state)

    def step_done(self, state: RunState, figures: Figures) -> None:
        step, planned = figures.tag["step"], figures.tag["response_tokens"]
        if abs(figures.response_tokens - planned) > 1e-6 * planned:  # beyond 2^24 an fp32 sum may round
            counted = f"{figures.response_tokens:.0f} response tokens on the device where {planned} were planned"
            text = f"step {step} counted {counted}: its loss and gradient are those of other data"
            self._warn(state, TOKENS, step, text)
        if figures.skipped:
            if figures.scale <= LEAST_SCALE:  # fp16's scale cannot fall further; other dtypes have 0 here
                self.skipped += 1
                self.first_skipped = figures.tag if self.skipped == 1 else self.first_skipped
            return
        self.skipped = 0
        self.zeros = self.zeros + 1 if figures.grad_norm == 0 and planned else 0
        if self.zeros == ZEROS:
            text = f"the gradient has been exactly zero for {ZEROS} steps (to step {step}): nothing is learnt; "
            text += "look at the data, or whether everything is learnt already"
            self._warn(state, NO_GRADIENT, step, text)
        self._check_spike(state, step, figures.loss)

    def evaluated(self, state: RunState, result: EvalResult) -> None:
        self.check_evaluation(state, result.loss)
        self._look_at_weights(state)
        self.halt_if_asked()

    def check_end(self, state: RunState) -> None:
        """All steps are done. Stop here if there is nothing to write: neither the last weights nor better ones from
        before are finite."""
        self._look_at_weights(state)
        self.halt_if_asked()
        if state.progress.best_step < 0 and not checkpoint.is_sound(state.parts.arena):
            self.ends_not_finite = True
            raise Halted

    def halt_if_asked(self) -> None:
        if self.stops:
            raise Halted

    def _check_spike(self, state: RunState, step: int, loss: float) -> None:
        if len(self.losses) >= ENOUGH and loss > min(self.losses) + LEAST_RISE:  # else no median is needed
            median = statistics.median(self.losses)
            spread = 1.4826 * statistics.median(abs(one - median) for one in self.losses)  # scaled MAD
            if loss > median + max(SPREADS * spread, LEAST_RISE, abs(median)):
                text = f"the loss of step {step} is {loss:.3f}, where the {len(self.losses)} steps before it have a "
                text += f"median of {median:.3f}: lower lr, or look at the data of this step"
                self._warn(state, SPIKE, step, text)
        self.losses.append(loss)

    def check_evaluation(self, state: RunState, loss: float) -> None:
        step, first = state.progress.step, state.progress.first_loss
        if step == 0 or first is None or not math.isfinite(first) or loss <= first * (1 + NOISE):
            return
        shown = f"{loss:.4f}" if math.isfinite(loss) else "not a finite number"
        text = f"the validation loss at step {step} is {shown}, above the {first:.4f} of the start: so far training "
        self._warn(state, WORSE, step, text + "makes the model worse on this data")

    def _look_at_weights(self, state: RunState) -> None:
        parts = state.parts
        self.check_moved(state, int(parts.step.count), int(bit_sum(parts.arena.weights)))

    def check_moved(self, state: RunState, updates: int, bits: int) -> None:
        """`bits`: the sum of the bits of all trainable weights."""
        step = state.progress.step
        before, self.last_weights = self.last_weights, (step, updates, bits)
        if before is not None and updates > before[1] and bits == before[2]:
            made = f"{updates - before[1]} updates were made between steps {before[0]} and {step}"
            text = f"{made} and not one trainable weight has changed: is lr zero?"
            self._warn(state, NOT_MOVED, step, text)

    def _warn(self, state: RunState, kind: str, step: int, text: str) -> None:
        if kind in self.reported:
            return
        self.reported.add(kind)
        state.report.warn(text, step, kind)
        if self.stop_on_warning:
            self.warning = self.warning or text

    # After Halted

    def halted(self, state: RunState) -> GraftuneError:
        """Leave the run so that it can be resumed, and return the error to raise. All ranks call it together."""
        state.parts.step.discard()
        with state.ranks.busy("stopping"):
            if self.too_many:
                found = _first_of_ranks(state, self._not_finite(state))
                what, fix = state.ranks.from_lead(lambda: self._too_many_skipped(state, found))
            elif self.ends_not_finite:
                what, fix = state.ranks.from_lead(lambda: self._ended_not_finite(state))
            else:
                what, fix = state.ranks.from_lead(lambda: self._stopped_by_warning(state))
        return GraftuneError(what, where=str(state.folder), fix=fix)

    def _too_many_skipped(self, state: RunState, found: str) -> list[str]:
        folder, parts, before = self.checkpoints.folder, state.parts, self._before(state)
        if checkpoint.is_sound(parts.arena):
            checkpoint.save(folder, parts.arena, before, self.checkpoints.identity, parts.step.scaler)
        for step, path in checkpoint.steps(folder).items():
            if step > before.step:
                remove_at_once(path)
        checkpoint.prune(folder, state.config.train.keep_last, before.best_step)
        state.report.end(state.parts, state.progress.step, "not finite")
        kept, first = self._newest(), self.first_skipped["step"]
        what = f"{self.skipped} updates in a row (steps {first} to {first + self.skipped - 1}) were skipped because "
        what += f"numbers were not finite: {found}; "
        what += (
            "there is no checkpoint from before them" if kept is None else f"step {kept}, from before them, is saved"
        )
        fix = "start anew with a lower lr or without these rows"
        fix += "" if kept is None else f", or go on from there with {resume_command(state.folder)}"
        return [what, f"{fix} (with max_skipped 0 it never stops for this)"]

    def _ended_not_finite(self, state: RunState) -> list[str]:
        state.report.end(state.parts, state.progress.step, "not finite")
        kept = self._newest()
        what = f"at the end, after step {state.progress.step}, the trained weights are not finite; "
        what += "there is no checkpoint" if kept is None else f"the last checkpoint is step {kept}"
        return [what, "start anew with a lower lr"]

    def _stopped_by_warning(self, state: RunState) -> list[str]:
        self.checkpoints.save(state)
        state.report.end(state.parts, state.progress.step, "warning")
        what, kept = f"stopped at step {state.progress.step}, as stop_on_warning asks: {self.warning}", self._newest()
        saved = f"the last checkpoint is step {kept}; go on with {resume_command(state.folder)}"
        return [what, "start anew: there is no checkpoint" if kept is None else saved]

    def _newest(self) -> int | None:
        """The step of the newest checkpoint."""
        return max(checkpoint.steps(self.checkpoints.folder), default=None)

    def _before(self, state: RunState) -> checkpoint.Progress:
        """The progress before the first skipped step. Evaluations since then have measured the weights of that step."""
        p, first = state.progress, self.first_skipped
        step, epoch = first["step"] - 1, first["epoch"]
        return replace(
            p,
            step=step,
            epoch=epoch,
            epoch_step=step - sum(state.epoch_steps[:epoch]),
            updates=int(state.parts.step.count),
            last_eval=min(p.last_eval, step),
            best_step=min(p.best_step, step),
        )

    def _not_finite(self, state: RunState) -> str:
        """Recompute this rank's micro-batches of the first skipped step. Returns a text that names the first value that
        is not finite and its rows of the data; empty: everything is finite."""
        parts, place, found_first = state.parts, self._before(state), ""
        if self.loader is None:
            return ""
        bins, layout = self.loader.plan(place.epoch)[place.epoch_step], self.loader.layout
        for number in self.loader.bins(place.epoch, place.epoch_step):
            indices = bins[number] if number < len(bins) else []
            examples = take(self.loader.examples, indices)
            batch = pack(examples, layout=layout)
            found = first_not_finite(parts.step, batch.to(parts.runtime.device), micro_batch_id(place.step, number))
            if found is not None and not found_first:
                documents = range(len(indices)) if found.documents is None else found.documents
                rows = [examples[i].row for i in documents if i < len(indices)]
                found_first = f"{found.what} is the first, {_rows(rows, label(state.config.data.data))}"
        return found_first


def _rows(rows: list[int], data: str) -> str:
    """Name the first SHOWN of these rows in a message. Rows of several files are numbered consecutively."""
    numbers = sorted(set(rows))
    shown = ", ".join(map(str, numbers[:SHOWN])) + (f" and {len(numbers) - SHOWN} more" if numbers[SHOWN:] else "")
    return f"in row{'s' * (len(numbers) > 1)} {shown} of {data or 'the data'}"


def _first_of_ranks(state: RunState, found: str) -> str:
    for rank, one in enumerate(state.ranks.gather(found)):
        if one:
            return one if state.ranks.world is None else f"{one}, on rank {rank}"
    return "computed again, step by step and without a graph, everything is finite"
