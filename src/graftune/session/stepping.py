"""What the verbs of a training loop take and give: the micro-batches of one step, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from graftune.batch import PackedBatch
from graftune.session.state import DataPosition
from graftune.step.pipeline import Figures


@dataclass(eq=False)
class Batch:
    """The packed examples of one optimizer step, in as many micro-batches as the settings make of them.

    While the step before it trains, it is packed and sent to the device by the loader's thread."""

    packed: Sequence[PackedBatch]
    tokens: int  # padding left out
    response_tokens: int
    position: DataPosition | None = None  # of the session in its data set, once the batch was used
    staged: Sequence[Any] | None = field(default=None, repr=False)  # on its way to the device, for one use
    fixed: bool = False  # of the shape that is captured

    @property
    def divisor(self) -> float:
        """What the loss's sums are divided by, of all micro-batches together."""
        return sum(batch.divisor for batch in self.packed)

    def __len__(self) -> int:
        return len(self.packed)

    def __repr__(self) -> str:
        count = "1 micro-batch" if len(self) == 1 else f"{len(self)} micro-batches"
        return f"Batch({self.tokens} tokens in {count}, {self.response_tokens} of them trained)"

    def take(self, stage: Callable[[PackedBatch], Any]) -> Sequence[Any]:
        """What was sent ahead; a second use sends it again."""
        staged, self.staged = self.staged, None
        return staged if staged is not None else [stage(batch) for batch in self.packed]


class StepStats:
    """The figures of one optimizer step. They are fetched when they are read: `loss`, `grad_norm` and `skipped` wait
    for the device to reach the end of that step, and a loop that reads them a step late does not wait at all.

    `loss` is the mean over the response tokens of the whole step."""

    def __init__(
        self, fetch: Callable[[StepStats], None], step: int, lr: float, tokens: int, response_tokens: int, tok_s: float
    ):
        self.step, self.lr, self.tokens, self.response_tokens, self.tok_s = step, lr, tokens, response_tokens, tok_s
        self._fetch, self._figures = fetch, list[Figures]()

    @property
    def ready(self) -> bool:
        """Whether reading the figures waits for nothing."""
        return bool(self._figures)

    @property
    def loss(self) -> float:
        return self._fetched().loss

    @property
    def grad_norm(self) -> float:
        """Before clipping."""
        return self._fetched().grad_norm

    @property
    def skipped(self) -> bool:
        """Whether the gradient was not finite, so that nothing was updated."""
        return self._fetched().skipped

    @property
    def figures(self) -> dict[str, float]:
        """The loss's own figures, by name."""
        return self._fetched().more

    def fill(self, figures: Figures) -> None:
        self._figures.append(figures)

    def _fetched(self) -> Figures:
        if not self._figures:
            self._fetch(self)
        return self._figures[0]

    def __repr__(self) -> str:
        return (
            f"StepStats(step={self.step}, loss={self.loss:.4f}, grad_norm={self.grad_norm:.3g}, lr={self.lr:.2e}, "
            f"tokens={self.tokens}, tok_s={self.tok_s:.0f}{', skipped' if self.skipped else ''})"
        )
