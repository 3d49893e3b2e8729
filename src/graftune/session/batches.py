"""The batches of a session, and the figures of its steps.

A batch is data packed for the session's loss, in the micro-batches of one step; the first pass begins where a loaded
state left off. Settings that are `auto` and depend on the data or on memory are resolved here, when a session first
trains: the tokens of a step by the data, the rest by the plan, or, where there is no planner, to values that always
work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graftune.batch import BatchLayout, PackedBatch
from graftune.data.dataset import Dataset, prepare
from graftune.data.encoded import lengths_of, take
from graftune.data.loader import Loader
from graftune.data.memory import Data, as_given
from graftune.data.pack import bins_in_order, largest, pack, pack_ahead
from graftune.data.summary import counted
from graftune.errors import GraftuneError
from graftune.losses import Loss, stores_reference
from graftune.session.parts import UNPLANNED, DataPosition, Parts, loader_of
from graftune.session.references import fill, with_references
from graftune.settings import auto
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
        """The divisor of the loss's sums over all micro-batches."""
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
        """The micro-batches that were sent to the device ahead; a second use sends them again."""
        staged, self._staged = self._staged, None
        return staged if staged is not None else [stage(batch) for batch in self.packed]

    def _suits(self, loss: Loss) -> bool:
        """Whether the batch has the fields and the divisor of this loss."""
        if loss is self._loss or self._loader is None:
            return True
        reads, has = loss.layout(self._loader.examples), self._loader.layout
        return set(reads.fields) <= set(has.fields) and replace(reads, fields=has.fields) == has


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
        """The mean over the response tokens of the whole step, or over the loss's own divisor."""
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


# Resolves `auto` when training begins, for a data set (None: for any) in batches of a layout.
Planner = Callable[[Parts, Dataset | None, BatchLayout], None]


class BatchFeed:
    """Makes batches of data sets, and remembers which part of the data a loaded state has trained on."""

    def __init__(self, parts: Parts):
        self.parts = parts
        self.planner: Planner | None = None
        self._loaded: tuple[Dataset, Loss, Loader] | None = None
        self._resume_at: DataPosition | None = None  # of a loaded state, until a pass has begun there
        self._passed: set[int] = set()  # epochs before it that were passed over

    def start_at(self, position: DataPosition | None) -> None:
        """Begin the next pass behind the position of a loaded state; None: at the beginning."""
        self._resume_at, self._passed, self._loaded = position, set(), None

    def batches(self, data: Dataset, epoch: int) -> Iterator[Batch]:
        parts, loader, loss = self.parts, self.loader_for(data), self.parts.loss
        start = self._start(data, epoch, loader)
        if start == loader.steps_per_epoch(epoch):
            return
        digest = data.digest
        pipeline = parts.pipeline  # made here, not by the thread that packs
        parts.fix_shape(loader, max(parts.config.train.epochs, epoch + 1))

        def stage(batch: PackedBatch) -> tuple[PackedBatch, Any]:
            return batch, (vars(parts).get("pipeline") or pipeline).stage(batch)  # another loss has another pipeline

        for index, held in enumerate(loader.epoch(epoch, start, stage), start):
            tokens, responses = loader.counts(epoch, index)
            packed, staged = zip(*held, strict=True)
            yield Batch(packed, tokens, responses, DataPosition(epoch, index + 1, digest), staged, loader, loss)
            parts.check_open()

    def loader_for(self, data: Dataset) -> Loader:
        parts, loss = self.parts, self.parts.loss
        if self._loaded is None or self._loaded[0] is not data or self._loaded[1] is not loss:
            if not len(data):
                raise GraftuneError("the data set has no examples", where=data.path or None, fix="give another one")
            examples = with_references(data.examples, loss, parts.config.train)
            layout = loss.layout(examples)
            self.resolve_auto(data, layout)
            if stores_reference(layout):
                parts.say(fill(parts, examples))
            asked, least = parts.config.train.tokens_per_micro_batch, largest(examples, layout)
            if least > asked:
                parts.say(f"micro-batches have {least} tokens, as the longest example, where {asked} were asked for")
            size = max(asked, least)
            how = {"fixed": parts.fixed_shapes, "layout": layout, "share": parts.share}
            self._loaded = data, loss, loader_of(parts.config, examples, size, **how)  # type: ignore[arg-type]
        return self._loaded[2]

    def resolve_auto(self, data: Dataset | None, layout: BatchLayout) -> None:
        parts, parameters, asked = self.parts, self.parts.base.spec.parameters, self.parts.config
        if data is not None:
            tokens = int(lengths_of(data.examples).sum())
            parts.config = auto.with_step_tokens(asked, parameters, tokens, len(data))
            if line := auto.said(asked, parts.config, parameters):
                parts.say(line)
        if parts.config.train.recompute != "auto" and parts.config.train.tokens_per_micro_batch:
            return
        if self.planner is not None:
            self.planner(parts, data, layout)
        settings = parts.config.train
        most = UNPLANNED if settings.tokens_per_step == "auto" else min(settings.step_tokens, UNPLANNED)
        parts.config = parts.config.replace(
            recompute="none" if settings.recompute == "auto" else settings.recompute,
            tokens_per_micro_batch=settings.tokens_per_micro_batch or most,
        )

    def _start(self, data: Dataset, epoch: int, loader: Loader) -> int:
        """The first step of an epoch that a loaded state has not taken. Each epoch begins there once."""
        saved = self._resume_at
        if saved is None or epoch in self._passed:
            return 0
        if epoch > saved.epoch:
            self._resume_at = None
            return 0
        if data.digest != saved.data:
            raise GraftuneError(
                "the loaded state was saved on other data",
                where=data.path or None,
                fix="go on with the same data and settings, or load the state with position=False",
            )
        total = loader.steps_per_epoch(epoch)
        start = min(saved.step, total) if epoch == saved.epoch else total
        if epoch < saved.epoch:
            self._passed.add(epoch)
        else:
            self._resume_at = None
        self.parts.say(
            f"epoch {epoch}: this pass leaves out {start} of {total} steps, which the saved session had taken"
        )
        return start

    def own_batch(self, batch: PackedBatch | Dataset | Data) -> Batch:
        """A batch that did not come from `batches`, in micro-batches of the session's size."""
        if isinstance(batch, PackedBatch):
            self.resolve_auto(None, self.parts.loss.layout(()))
            return Batch([batch], len(batch.tokens), batch.response_tokens)
        examples = self.examples(batch, "forward_backward").examples
        layout = self.parts.loss.layout(examples)
        self.resolve_auto(None, layout)
        bins = bins_in_order(examples, self.parts.config.train.tokens_per_micro_batch, layout)
        packed = [pack(take(examples, held), layout=layout) for held in bins]
        if layout.ahead is not None:
            capacity = self.parts.config.train.tokens_per_micro_batch
            packed[0].ahead = pack_ahead(examples, layout, capacity, self.parts.share)
        return Batch(packed, int(lengths_of(examples).sum()), sum(one.response_tokens for one in packed))

    def examples(self, data: Data | Dataset, verb: str) -> Dataset:
        """A data set. Records are encoded for this call, and those that are left out or shortened are reported."""
        parts = self.parts
        if isinstance(data, Dataset):
            found = data
        else:
            found = prepare(as_given(data, verb), parts.tokenizer, parts.config.data, None, parts.loss.data, keep=False)
            summary = found.summary
            for reason, count in (*summary.refused.items(), *summary.dropped.items()):
                parts.say(f"{verb}: {counted(count, 'record')} left out: {reason}")
            for reason, count in summary.truncated.items():
                parts.say(f"{verb}: {counted(count, 'record')} shortened: {reason}")
        if not len(found):
            raise GraftuneError(f"{verb} was given a data set without examples", fix="give another one")
        return found
