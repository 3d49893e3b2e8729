"""What the verbs of a training loop take and give: the micro-batches of one step, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from graftune.batch import PackedBatch
from graftune.data.loader import Loader
from graftune.losses import Loss
from graftune.session.state import DataPosition
from graftune.step.pipeline import Figures


@dataclass(eq=False)
class Batch:
    """The packed examples of one optimizer step, in as many micro-batches as the settings make of them.

    While the step before it trains, it is packed and sent to the device by the loader's thread."""

    packed: Sequence[PackedBatch]  # the micro-batches
    tokens: int  # padding left out
    response_tokens: int  # those that are trained
    _position: DataPosition | None = None  # of the session in its data set, once the batch was used
    _staged: Sequence[Any] | None = field(default=None, repr=False)  # on its way to the device, for one use
    _loader: Loader | None = field(default=None, repr=False)  # that packed it, for a loss
    _loss: Loss | None = field(default=None, repr=False)  # that it was packed for

    @property
    def divisor(self) -> float:
        """What the loss's sums are divided by, of all micro-batches together."""
        return sum(batch.divisor for batch in self.packed)

    def __len__(self) -> int:
        """Micro-batches."""
        return len(self.packed)

    def __repr__(self) -> str:
        count = "1 micro-batch" if len(self) == 1 else f"{len(self)} micro-batches"
        return f"Batch({self.tokens} tokens in {count}, {self.response_tokens} of them trained)"

    @property
    def _fixed(self) -> bool:
        """Whether it has the shape that is captured."""
        return self._loader is not None and self._loader.fixed

    def _take(self, stage: Callable[[PackedBatch], Any]) -> Sequence[Any]:
        """What was sent ahead; a second use sends it again."""
        staged, self._staged = self._staged, None
        return staged if staged is not None else [stage(batch) for batch in self.packed]

    def _suits(self, loss: Loss) -> bool:
        """Whether the loss finds in it what it reads, and is divided by what it says."""
        loader = self._loader
        return loss is self._loss or loader is None or loss.layout(loader.examples) == loader.layout


class StepStats:
    """The figures of one optimizer step. They are fetched when they are read: `loss`, `grad_norm`, `skipped` and
    `figures` wait for the device to reach the end of that step, and a loop that reads them a step late does not wait
    at all."""

    step: int  # counted from 1
    lr: float  # of this step
    tokens: int  # padding left out
    response_tokens: int  # those that are trained
    tok_s: float  # tokens per second, over the last steps

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
        """The mean over the response tokens of the whole step, or by what else the loss divides."""
        return self._fetched().loss

    @property
    def grad_norm(self) -> float:
        """The gradient's norm before clipping."""
        return self._fetched().grad_norm

    @property
    def skipped(self) -> bool:
        """Whether the gradient was not finite, so that nothing was updated."""
        return self._fetched().skipped

    @property
    def figures(self) -> dict[str, float]:
        """The loss's own figures, by name."""
        return self._fetched().more

    def _fill(self, figures: Figures) -> None:
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
