"""What a run notices about its own numbers, from figures that arrive anyway: nothing here waits for the device.

    not finite    updates that were skipped one after the other: after `max_skipped` of them the run stops
    loss spike    a loss far above those of the steps before it
    no gradient   a gradient norm of exactly zero, several steps in a row
    tokens        a count of response tokens on the device that is not the planned one
    not moved     updates were made, and the weights are bit for bit what they were
    worse         a validation loss above the one before the first step

Each of the last five is said once in a run, as a `warning` event with its kind and on the console; with
`stop_on_warning` the run stops there. All ranks see the same figures and come to the same conclusions, but for what is
looked at when rank 0 alone writes: that is looked at nowhere else than at points that all ranks reach.

fp16 skips updates until its loss scale fits, which takes 16 halvings at most: these do not count.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from graftune.kernels.grad_norm.reference import LEAST_SCALE
from graftune.step.pipeline import Figures

WINDOW, ENOUGH = 50, 20  # steps that a loss is compared with, at most and at least
SPREADS = 6.0  # of the window's losses that a spike is above their median, and
LEAST_RISE = 0.5  # nats at least, and the median itself
ZEROS = 3  # steps in a row without a gradient
NOISE = 0.01  # share of the first validation loss that one above it is taken for noise by
SPIKE, NO_GRADIENT, TOKENS, NOT_MOVED, WORSE = "loss_spike", "no_gradient", "tokens", "not_moved", "worse_than_base"

Warn = Callable[[str, int, str], None]  # text, step, kind


@dataclass
class Guard:
    warn: Warn
    max_skipped: int  # in a row, after which the run stops; 0: never
    stop_on_warning: bool
    said: set[str] = field(default_factory=set)  # kinds, this time or before a resume
    warning: str = ""  # the one that stops the run
    skipped: int = 0  # steps in a row whose update was skipped
    first_skipped: dict[str, Any] = field(default_factory=dict)  # facts of the first of them
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    ends_not_finite: bool = (
        False  # the run has come to its end with weights that are not finite, and has none from before
    )
    zeros: int = 0
    mark: tuple[int, int, int] | None = None  # step, updates and weights when these were last looked at

    @property
    def too_many(self) -> bool:
        return 0 < self.max_skipped <= self.skipped

    @property
    def stops(self) -> bool:
        return self.too_many or bool(self.warning)

    def step(self, done: Figures) -> None:
        """The figures of a step that is done."""
        step, planned = done.tag["step"], done.tag["response_tokens"]
        if abs(done.response_tokens - planned) > 1e-6 * planned:  # beyond 2^24 an fp32 sum may round
            counted = f"{done.response_tokens:.0f} response tokens on the device where {planned} were planned"
            self._say(TOKENS, step, f"step {step} counted {counted}: its loss and gradient are those of other data")
        if done.skipped:
            if done.scale <= LEAST_SCALE:  # fp16's has nowhere left to fall; of other dtypes it is 0
                self.skipped += 1
                self.first_skipped = done.tag if self.skipped == 1 else self.first_skipped
            return
        self.skipped = 0
        self.zeros = self.zeros + 1 if done.grad_norm == 0 and planned else 0
        if self.zeros == ZEROS:
            self._say(
                NO_GRADIENT, step, f"the gradient has been exactly zero for {ZEROS} steps (to step {step}): nothing is "
                "learnt; look at the data, or whether everything is learnt already",
            )  # fmt: skip
        self._spike(step, done.loss)

    def _spike(self, step: int, loss: float) -> None:
        if len(self.losses) >= ENOUGH and loss > min(self.losses) + LEAST_RISE:  # else it is none: no median is taken
            median = statistics.median(self.losses)
            spread = 1.4826 * statistics.median(abs(one - median) for one in self.losses)  # as a normal one's deviation
            if loss > median + max(SPREADS * spread, LEAST_RISE, abs(median)):
                self._say(
                    SPIKE, step, f"the loss of step {step} is {loss:.3f}, where the {len(self.losses)} steps before it "
                    f"have a median of {median:.3f}: lower lr, or look at the data of this step",
                )  # fmt: skip
        self.losses.append(loss)

    def evaluation(self, step: int, loss: float, first: float | None) -> None:
        """`first`: the validation loss before the first step."""
        if step == 0 or first is None or not math.isfinite(first) or loss <= first * (1 + NOISE):
            return
        shown = f"{loss:.4f}" if math.isfinite(loss) else "not a finite number"
        self._say(
            WORSE, step,
            f"the validation loss at step {step} is {shown}, above the {first:.4f} of the start: so far training makes "
            "the model worse on this data",
        )  # fmt: skip

    def weights(self, step: int, updates: int, bits: int) -> None:
        """`bits`: the sum of the bits of all that trains, at a point where the host has waited for the device."""
        before, self.mark = self.mark, (step, updates, bits)
        if before is not None and updates > before[1] and bits == before[2]:
            made = f"{updates - before[1]} updates were made between steps {before[0]} and {step}"
            self._say(NOT_MOVED, step, f"{made} and not one weight that trains has changed: is lr zero?")

    def _say(self, kind: str, step: int, text: str) -> None:
        if kind in self.said:
            return
        self.said.add(kind)
        self.warn(text, step, kind)
        if self.stop_on_warning:
            self.warning = self.warning or text
