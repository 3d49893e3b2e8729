"""The interface of a loss.

A loss declares which kind of data it takes, what its batches contain (`fields_of`), which figures it reports, and which
reference model it compares with, if any. Called with the decoder's output, it returns a sum over the batch and the
gradient of the output's rows. It does not divide: the step divides once, by the layout's shares over the whole
optimizer step, so that N micro-batches equal one large batch. It reads no device value and launches the same kernels
for every batch of a shape, so that the step can be captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from graftune import spans
from graftune.batch import PLAIN, BatchLayout, Example, Field, PackedBatch
from graftune.data.encoded import (
    groups_of,
    has_weights,
    kind_of,
    reference_model_of,
    references_of,
    token_references_of,
    weight_sums_of,
    weights_of,
)
from graftune.data.kind import ANSWERS, DataKind
from graftune.errors import GraftuneError
from graftune.kernels import rehearsal
from graftune.kernels.rehearsal import LOGITS
from graftune.losses.answers import per_answer
from graftune.model.arena import Start
from graftune.model.context import PassContext
from graftune.model.decoder import Decoder
from graftune.model.head import Output

# Fields of stored log-probabilities, with one name per reference model, so that a batch with those of the base can also
# be given to losses that compare with the start, or with nothing.
_STORED = {"base": "base_log_probs", "start": "start_log_probs"}
# The loss is divided by the sum of weights: a weight is a token's share in the step, not a factor of the step's size.
WEIGHTED = BatchLayout(fields=(Field("weights", torch.float32, weights_of),), shares=weight_sums_of)


class Computed(NamedTuple):
    """A loss's result for one micro-batch: sums, all on the device."""

    total: torch.Tensor  # 0-dim fp32
    grad: torch.Tensor | None  # of `Output.normed`, times the loss scale; None without `need_grad`
    figures: torch.Tensor | None = None  # [Loss.sums] fp32


class Loss(ABC):
    """A training loss; subclasses implement `__call__`."""

    figures: tuple[str, ...] = ()  # names of what it reports besides its value; `means` computes them from sums
    # Which of them may choose the best checkpoint (the setting `best`), and which direction is better.
    better: Mapping[str, Literal["higher", "lower"]] = {}
    # The reference model whose log-probabilities it needs: the model with adapters off (base), or with the trainable
    # weights of the start of the run (start). "": none. They are stored with the data before the first step, or are
    # computed in one more forward pass per micro-batch (the setting reference_pass).
    reference: Literal["", "base", "start"] = ""
    # Whether it needs them for each label, or only their sum over each document. The sum needs losses/answers.py's
    # fields in the layout.
    reference_per: Literal["label", "document"] = "label"

    data: DataKind = ANSWERS  # the kind of data that it takes
    temperature: float = 1.0  # divides the logits, of the reference model too
    # How many sums over the whole optimizer step it needs before the step's micro-batches. They are computed in forward
    # passes over the examples that the layout's `ahead` makes, and found in `batch.extra["ahead"]`.
    ahead: int = 0

    @property
    def sums(self) -> int:
        """How many sums it returns as `Computed.figures`; they are added over micro-batches and ranks."""
        return len(self.figures)

    def forwards(self, layout: BatchLayout) -> int:
        """Forward passes over a step's tokens besides the one that is trained, for batches of this layout."""
        models, computed = 2 if self.reference else 1, bool(self.reference) and not stores_reference(layout)
        return computed + (models if self.ahead else 0)

    def means(self, sums: torch.Tensor, divisor: torch.Tensor | float) -> torch.Tensor:
        """The figures, from the sums [sums] over an optimizer step or an evaluation. By default each sum is divided as
        the loss is; a loss whose figures have counts of their own returns those too and divides here."""
        return sums / divisor

    def fields_of(self, examples: Sequence[Example]) -> BatchLayout:
        """The fields of a batch of these examples besides the labels, and the divisor of the loss. `layout` adds the
        groups of the data and the stored log-probabilities of the reference model."""
        return WEIGHTED if has_weights(examples) else PLAIN

    def layout(self, examples: Sequence[Example]) -> BatchLayout:
        """`fields_of`, plus groups and stored log-probabilities of the reference, which do not depend on the formula.
        Refuses data of another kind, and weights that `fields_of` does not read."""
        self.check_kind(kind_of(examples))
        layout = self.fields_of(examples)
        if has_weights(examples) and weights_of not in [field.read for field in layout.fields]:
            raise GraftuneError(
                f"examples have weights, which {type(self).__name__} does not read",
                fix="leave them out (in data, the column loss_weight and the weights of turns), or set another loss",
            )
        if self.reference and reference_model_of(examples) == self.reference:
            per_token = self.reference_per == "label"
            read, dtype = (token_references_of, torch.float32) if per_token else (references_of, torch.float64)
            field = Field(_STORED[self.reference], dtype, read, self.reference_per)
            layout = replace(layout, fields=(*layout.fields, field))
        if self.data.members < 2:
            return layout
        self._check_groups(groups_of(examples))
        return replace(layout, groups=groups_of)

    def check_kind(self, found: str | None) -> None:
        """Refuse data of another kind. `found`: the name of the data's kind; None: unknown."""
        if found not in (None, self.data.name):
            raise GraftuneError(
                f"the loss {type(self).__name__} takes {self.data.name}, and this data holds {found}",
                fix=f"give data of {self.data.name}, prepared for this loss, or set another loss",
            )

    def _check_groups(self, groups: np.ndarray) -> None:
        """Refuse incomplete groups: the members of a group must be adjacent and as many as the kind has."""
        borders = np.flatnonzero(np.diff(groups, prepend=-2, append=-2))
        if (groups < 0).any() or (np.diff(borders) != self.data.members).any():
            raise GraftuneError(
                f"the loss {type(self).__name__} takes {self.data.name}, {self.data.members} examples each, and some "
                "of these examples are not whole groups of as many",
                fix="give every example the number of its group, and the examples of a group one behind the other",
            )

    @abstractmethod
    def __call__(
        self,
        output: Output,
        batch: PackedBatch,
        reference: torch.Tensor | None = None,
        *,
        scale: torch.Tensor | None = None,
        need_grad: bool = True,
    ) -> Computed:
        """Compute the loss of a batch. `reference`: log p of the reference model, of each label [R] fp32 or of each
        document [S] fp64 (`reference_per`). `scale`: fp16's loss scale, which multiplies only the gradient."""

    def sums_ahead(self, log_probs: torch.Tensor, reference: torch.Tensor | None, batch: PackedBatch) -> torch.Tensor:
        """The sums [ahead] of one batch of the examples ahead, from log p(label) [R] of the model and log p of the
        reference."""
        raise NotImplementedError(f"{type(self).__name__} declares sums ahead and does not compute them")

    def cross_entropy(self, loss: float, figures: Mapping[str, float]) -> float | None:
        """The mean cross-entropy per token, from which an evaluation computes perplexity, if the loss has one."""
        return figures.get("cross_entropy")


def checked(loss: Loss, found: Computed, rows: torch.Tensor, *, need_grad: bool = True) -> Computed:
    """Check what a loss returned, and raise an error if the step cannot use it. `rows`: the output's rows, whose shape
    the gradient must have."""
    name, count = type(loss).__name__, loss.sums
    if not isinstance(found, tuple) or len(found) != 3:
        what, fix = f"returned {_kind(found)}", "return Computed(total, grad, figures)"
    elif not isinstance(found[0], torch.Tensor) or found[0].dim():
        what, fix = (
            f"returned {_kind(found[0])} as its total",
            "return the sum over the batch, a tensor of 0 dimensions",
        )
    elif (found[1] is not None or need_grad) and (
        not isinstance(found[1], torch.Tensor) or found[1].shape != rows.shape
    ):
        what, fix = f"returned {_kind(found[1])} as its gradient", f"return a tensor of the shape {list(rows.shape)}"
    elif (found[2] is not None or count) and (not isinstance(found[2], torch.Tensor) or found[2].shape != (count,)):
        names = f" ({', '.join(loss.figures)})" if count else ""
        what = f"returned {_kind(found[2])} as its figures and declares {count} of them{names}"
        fix = f"return a tensor of {count} sums in the order of `figures`" if count else "name them in `figures`"
    else:
        return Computed(*found)
    raise GraftuneError(f"the loss {name} {what}", fix=fix)


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of the shape {list(value.shape)}"
    return "nothing" if value is None else f"an object of the type {type(value).__name__}"


class LogProbLoss(Loss):
    """A loss that is a function of the labels' log-probabilities, in two passes over the head.

    The first pass computes log p(label) of every row; `of_log_probs` returns the loss, and autograd over that one
    vector its derivative with respect to each; the second pass recomputes the logits and computes the gradient.
    """

    @abstractmethod
    def of_log_probs(
        self, log_probs: torch.Tensor, reference: torch.Tensor | None, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """log p(label) [R], 0 where a row is padding -> (the loss's sum, the figures' sums or None), in torch's
        differentiable operations."""

    def __call__(
        self,
        output: Output,
        batch: PackedBatch,
        reference: torch.Tensor | None = None,
        *,
        scale: torch.Tensor | None = None,
        need_grad: bool = True,
    ) -> Computed:
        log_probs = output.log_probs(batch.labels).detach().requires_grad_(need_grad)
        with torch.set_grad_enabled(need_grad):
            found = self.of_log_probs(log_probs, reference, batch)
        if not isinstance(found, tuple) or len(found) != 2:
            what = f"the loss {type(self).__name__} returned {_kind(found)} from of_log_probs"
            raise GraftuneError(what, fix="return two values: the sum and the figures (or None)")
        total, figures = found
        if not isinstance(total, torch.Tensor) or total.dim():
            return Computed(total, log_probs, figures)  # which `checked` refuses
        grad = None
        if need_grad:
            if not total.requires_grad:
                what = f"the sum of the loss {type(self).__name__} has no derivative by the log-probabilities"
                raise GraftuneError(what, fix="compute it from log_probs, without detach() or no_grad()")
            (slopes,) = torch.autograd.grad(total, log_probs)
            grad = output.grad_of(batch.labels, slopes, scale)
        return Computed(total.detach(), grad, figures.detach() if isinstance(figures, torch.Tensor) else figures)


def stores_reference(layout: BatchLayout) -> bool:
    """Whether batches of this layout have the log-probabilities of the reference model in them."""
    return any(field.name in _STORED.values() for field in layout.fields)


def reference_of(
    loss: Loss, decoder: Decoder, batch: PackedBatch, ctx: PassContext, start: Start | None
) -> torch.Tensor | None:
    """The log-probabilities of the loss's reference model: those that the batch has, else from a forward pass without a
    tape. None if the loss needs none."""
    if not loss.reference:
        return None
    if (stored := batch.extra.get(_STORED[loss.reference])) is not None:
        return stored
    found = reference_log_probs(loss, decoder, batch, ctx, start)
    return found if loss.reference_per == "label" else per_answer(found, batch)


def reference_log_probs(
    loss: Loss, decoder: Decoder, batch: PackedBatch, ctx: PassContext, start: Start | None
) -> torch.Tensor:
    """log p(label) [R] of the loss's reference model."""
    spans.phase("reference")
    if loss.reference == "base":
        return _log_probs(loss, decoder, batch, replace(ctx, adapted=False, dropout=None))
    assert start is not None, "a session with such a loss keeps a snapshot of the start"
    with start.restored():
        return _log_probs(loss, decoder, batch, replace(ctx, adapted=True, dropout=None))


def sums_ahead(loss: Loss, decoder: Decoder, batch: PackedBatch, ctx: PassContext, start: Start | None) -> torch.Tensor:
    """The loss's sums over a batch of the examples ahead, from forward passes without a tape. Without dropout."""
    ctx = replace(ctx, dropout=None)
    reference = reference_of(loss, decoder, batch, ctx, start)
    spans.phase("ahead")
    return loss.sums_ahead(_log_probs(loss, decoder, batch, ctx), reference, batch)


def _log_probs(loss: Loss, decoder: Decoder, batch: PackedBatch, ctx: PassContext) -> torch.Tensor:
    stream = decoder.forward(batch.tokens, ctx, batch.rows)
    with rehearsal.owned(LOGITS):
        output = decoder.read_out(stream, adapted=ctx.adapted, temperature=loss.temperature)
        return output.log_probs(batch.labels)
