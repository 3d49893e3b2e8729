"""The batches of a session, and the figures of its steps.

A batch is data packed for the session's loss, in the micro-batches of one step; the first pass begins where a loaded
state left off. Examples that come without a data set, step by step, are packed in order. On CUDA their micro-batches
all have the shape that the first ones needed, rounded up, so that they replay from one graph: what exceeds it goes into
further micro-batches, and only a single example that exceeds it makes the shape grow.

Settings that are `auto` and depend on the data or on memory are resolved here, when a session first trains: the tokens
of a step by the data, the rest by the plan, or, where there is no planner, to values that always work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graftune.arithmetic import power_of_two
from graftune.batch import BatchLayout, Example, PackedBatch
from graftune.data.dataset import Dataset, prepare
from graftune.data.encoded import lengths_of, responses_of
from graftune.data.loader import Loader
from graftune.data.memory import Data, as_given
from graftune.data.pack import (
    Capacities,
    ahead_capacities,
    bins_in_order,
    bins_within,
    capacities,
    largest,
    largest_units,
    pack_ahead,
    pack_bins,
    whole_tiles,
)
from graftune.data.summary import counted
from graftune.data.tokenised import examples_of, is_tokenised
from graftune.errors import GraftuneError
from graftune.losses import Loss, stores_reference
from graftune.session.parts import OWN, UNPLANNED, DataPosition, SessionParts, loader_of
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
    divisor: float  # of the loss's sums over all micro-batches, those of other ranks too
    _position: DataPosition | None = None  # of the session in its data set, once the batch was used
    _staged: Sequence[Any] | None = field(default=None, repr=False)  # on its way to the device, for one use
    _loader: Loader | None = field(default=None, repr=False)  # the loader that packed it
    _loss: Loss | None = field(default=None, repr=False)  # the loss that it was packed for
    _fixed: bool = field(default=False, repr=False)  # whether it has the fixed shape of captured steps

    def __len__(self) -> int:
        return len(self.packed)

    def __repr__(self) -> str:
        count = "1 micro-batch" if len(self) == 1 else f"{len(self)} micro-batches"
        return f"Batch({self.tokens} tokens in {count}, {self.response_tokens} of them trained)"

    def _take(self, stage: Callable[[PackedBatch], Any]) -> Iterable[Any]:
        """The staged micro-batches: sent to the device ahead by the loader, or each one when it is taken."""
        staged, self._staged = self._staged, None
        return staged if staged is not None else map(stage, self.packed)

    def _suits(self, loss: Loss) -> bool:
        """Whether the batch has the fields and the divisor of this loss."""
        if loss is self._loss or self._loader is None:
            return True
        reads, has = loss.layout(self._loader.examples), self._loader.layout
        return set(reads.fields) <= set(has.fields) and replace(reads, fields=has.fields) == has


@dataclass(eq=False, repr=False)
class StepStats:
    """The figures of one optimizer step. They are fetched when they are read: `loss`, `grad_norm`, `skipped` and
    `figures` wait for the device to reach the end of that step, and a loop that reads them a step late does not wait
    at all."""

    step: int  # counted from 1
    lr: float  # of this step
    tokens: int  # padding left out
    response_tokens: int  # those that are trained
    tok_s: float  # tokens per second, over the last steps
    _fetch: Callable[[StepStats], None]  # waits until the device has the figures
    _figures: Figures | None = None

    @property
    def ready(self) -> bool:
        """Whether reading the figures waits for nothing."""
        return self._figures is not None

    @property
    def loss(self) -> float:
        """The mean over the response tokens of the whole step, or over the loss's own divisor."""
        return self.fetched().loss

    @property
    def grad_norm(self) -> float:
        """The gradient's norm before clipping."""
        return self.fetched().grad_norm

    @property
    def skipped(self) -> bool:
        """Whether the gradient was not finite, so that nothing was updated."""
        return self.fetched().skipped

    @property
    def figures(self) -> dict[str, float]:
        """The loss's own figures, by name."""
        return self.fetched().more

    def fetched(self) -> Figures:
        """All figures, as the pipeline reports them."""
        if self._figures is None:
            self._fetch(self)
        assert self._figures is not None
        return self._figures

    def __repr__(self) -> str:
        return (
            f"StepStats(step={self.step}, loss={self.loss:.4f}, grad_norm={self.grad_norm:.3g}, lr={self.lr:.2e}, "
            f"tokens={self.tokens}, tok_s={self.tok_s:.0f}{', skipped' if self.skipped else ''})"
        )


# Resolves `auto` when training begins, for a data set (None: for any) in batches of a layout.
Planner = Callable[[SessionParts, Dataset | None, BatchLayout], object]


class BatchFeed:
    """Makes batches of data sets, and remembers which part of the data a loaded state has trained on."""

    def __init__(self, parts: SessionParts):
        self.parts = parts
        self.planner: Planner | None = None
        self.asked_tokens = parts.config.train.tokens_per_micro_batch  # by the user; 0: planned
        self._longest_ahead = 0  # tokens of the longest example in passes ahead of steps of own examples
        self._loaded: tuple[Dataset, Loss, Loader] | None = None
        self._resume_at: DataPosition | None = None  # of a loaded state, until a pass has begun there
        self._passed: set[int] = set()  # epochs before that position which were skipped

    def start_at(self, position: DataPosition | None) -> None:
        """Begin the next pass after the position of a loaded state; None: at the beginning."""
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
            position, divisor = DataPosition(epoch, index + 1, digest), loader.divisor(epoch, index)
            yield Batch(packed, tokens, responses, divisor, position, staged, loader, loss, loader.shape is not None)
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
            self._loaded = data, loss, loader_of(parts.config, examples, size, layout=layout, share=parts.share)
        return self._loaded[2]

    def resolve_auto(self, data: Dataset | None, layout: BatchLayout) -> None:
        parts, parameters, asked = self.parts, self.parts.base.spec.parameters, self.parts.config
        if data is not None:
            tokens = int(lengths_of(data.examples).sum())
            parts.config = auto.with_step_tokens(asked, parameters, tokens, len(data))
            if line := auto.explanation(asked, parts.config, parameters):
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

    def own_batch(self, batch: PackedBatch | Dataset | Data | Sequence[Example]) -> Batch:
        """A batch that did not come from `batches`, in micro-batches of the session's size."""
        if isinstance(batch, PackedBatch):
            self.resolve_auto(None, self.parts.loss.layout(()))
            return Batch([batch], len(batch.tokens), batch.response_tokens, batch.divisor)
        parts, examples = self.parts, self.examples(batch, "forward_backward")
        layout = parts.loss.layout(examples)
        self.resolve_auto(None, layout)
        lengths, responses = lengths_of(examples), responses_of(examples)
        most = parts.config.train.tokens_per_micro_batch
        shape = self._own_shape(examples, layout, most) if parts.fixed_shapes else None
        bins = bins_in_order(examples, most, layout) if shape is None else bins_within(examples, shape, layout)
        packed = pack_bins(examples, bins, lengths, layout, parts.share, shape)
        ahead = None
        if layout.ahead is not None:
            if shape is not None:
                self._longest_ahead = max(self._longest_ahead, power_of_two(layout.ahead.longest(examples)))
                ahead = ahead_capacities(shape, self._longest_ahead)
            packed[0].ahead = pack_ahead(examples, layout, most, parts.share, ahead)
        if shape is not None:
            parts.pipeline.bound_documents(shape.longest, ahead.longest if ahead else 0)
        divisor = float((responses if layout.shares is None else layout.shares(examples)).sum())
        return Batch(packed, int(lengths.sum()), int(responses.sum()), divisor, _fixed=shape is not None)

    def _own_shape(self, examples: Sequence[Example], layout: BatchLayout, most: int) -> Capacities:
        """The fixed shape of micro-batches of these examples. The first examples and the settings decide it."""
        parts, settings = self.parts, self.parts.config.train
        if OWN not in parts.shapes:
            docs, rows = settings.documents_per_micro_batch, settings.rows_per_micro_batch
            bins = bins_in_order(examples, most, layout, docs=docs or math.inf, rows=rows or math.inf)
            need = capacities(bins, lengths_of(examples), responses_of(examples))
            asked = need._replace(capacity=max(need.capacity, whole_tiles(self.asked_tokens)))
            first = asked.grown(need, most, parts.config.data.max_seq_len)
            if docs:
                first = first._replace(max_docs=docs + first.padding_docs)
            if rows:
                first = first._replace(max_rows=whole_tiles(rows))
            parts.shape_for(OWN, first, most)
        return parts.shape_for(OWN, largest_units(examples, layout), most)

    def examples(self, data: Data | Dataset | Sequence[Example], verb: str) -> Sequence[Example]:
        """The examples of a data set; or tokenised ones, after checks; or records, encoded for this call. Reports
        records that are left out or shortened."""
        parts = self.parts
        if is_tokenised(data):
            return examples_of(data, parts.base.spec.vocab, parts.config.data.max_seq_len)  # type: ignore[arg-type]
        if isinstance(data, Dataset):
            found = data
        else:
            given = as_given(data, verb)  # type: ignore[arg-type]  # tokenised examples were returned above
            found = prepare(given, parts.tokenizer, parts.config.data, None, parts.loss.data, keep=False)
            summary = found.summary
            for reason, count in (*summary.refused.items(), *summary.dropped.items()):
                parts.say(f"{verb}: {counted(count, 'record')} left out: {reason}")
            for reason, count in summary.truncated.items():
                parts.say(f"{verb}: {counted(count, 'record')} shortened: {reason}")
        if not len(found):
            raise GraftuneError(f"{verb} was given a data set without examples", fix="give another one")
        return found.examples
