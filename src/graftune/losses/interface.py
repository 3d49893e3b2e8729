"""What a loss is to the rest of the package.

A loss says which kind of data it takes, what its batches hold (`fields_of`), which figures it reports, and what it
compares with, if anything. Called with the decoder's output it returns a sum over the batch and the gradient of the
output's rows. It never divides: the one division, by the layout's shares over the whole optimizer step, is the step's,
so that N micro-batches equal one. It reads nothing back and launches the same kernels for every batch of a shape, so
that the step can be captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from graftune.batch import PLAIN, BatchLayout, Example, Field, PackedBatch
from graftune.data.encoded import groups_of, has_weights, kind_of, weight_sums_of, weights_of
from graftune.data.kind import ANSWERS, DataKind
from graftune.errors import GraftuneError
from graftune.kernels import rehearsal
from graftune.kernels.rehearsal import LOGITS
from graftune.model.context import PassContext
from graftune.model.decoder import Decoder
from graftune.model.head import Output
from graftune.model.start import Start

# Divided by the sum of weights: a weight says how much a token counts beside others, not how large a step is.
WEIGHTED = BatchLayout(fields=(Field("weights", torch.float32, weights_of),), shares=weight_sums_of)


class Computed(NamedTuple):
    """What a loss makes of one micro-batch: sums, all on the device."""

    total: torch.Tensor  # 0-dim fp32
    grad: torch.Tensor | None  # of `Output.normed`, times the loss scale; None where none was asked for
    figures: torch.Tensor | None = None  # [len(Loss.figures)] fp32


class Loss(ABC):
    figures: tuple[str, ...] = ()  # names of what is reported beside the loss, divided as the loss is
    # Whose log-probabilities it compares with, from one more forward pass per micro-batch: the model with adapters off
    # (base), or with what trains as it was when the run began (start). "": nobody's.
    reference: Literal["", "base", "start"] = ""

    data: DataKind = ANSWERS  # what its data has to be

    def fields_of(self, examples: Sequence[Example]) -> BatchLayout:
        """What batches of these examples hold beside the labels, and what the loss is divided by. Groups are added by
        `layout`, as the data has them."""
        return WEIGHTED if has_weights(examples) else PLAIN

    def layout(self, examples: Sequence[Example]) -> BatchLayout:
        """`fields_of` with the groups of the data; refuses data of another kind."""
        self.check_kind(kind_of(examples))
        if self.data.members == 1:
            return self.fields_of(examples)
        self._check_groups(groups_of(examples))
        return replace(self.fields_of(examples), groups=groups_of)

    def check_kind(self, found: str | None) -> None:
        """`found`: what the records of some data are, by name; None: nobody said."""
        if found not in (None, self.data.name):
            raise GraftuneError(
                f"the loss {type(self).__name__} takes {self.data.name}, and this data holds {found}",
                fix=f"give data of {self.data.name}, prepared for this loss, or set another loss",
            )

    def _check_groups(self, groups: np.ndarray) -> None:
        """That every group is whole: its members follow each other and are as many as the kind has."""
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
        """`reference` [R] fp32: log p(label) of what the loss compares with. `scale`: fp16's loss scale, which
        multiplies the gradient and nothing else."""

    def cross_entropy(self, loss: float, figures: Mapping[str, float]) -> float | None:
        """The mean cross-entropy per token that an evaluation's perplexity is made of, if the loss has one."""
        return figures.get("cross_entropy")


class LogProbLoss(Loss):
    """A loss that is a function of the labels' log-probabilities: two passes over the head.

    The first pass gives log p(label) of every row; `of_log_probs` makes the loss of them, and its derivative by each;
    the second pass computes the logits again and makes the gradient.
    """

    @abstractmethod
    def of_log_probs(
        self, log_probs: torch.Tensor, reference: torch.Tensor | None, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """log p(label) [R], 0 where a row is padding -> (sum, its derivative by every log p [R], figures)."""

    def __call__(
        self,
        output: Output,
        batch: PackedBatch,
        reference: torch.Tensor | None = None,
        *,
        scale: torch.Tensor | None = None,
        need_grad: bool = True,
    ) -> Computed:
        total, slopes, figures = self.of_log_probs(output.log_probs(batch.labels), reference, batch)
        grad = output.grad_of(batch.labels, slopes, scale) if need_grad else None
        return Computed(total, grad, figures)


def reference_log_probs(
    loss: Loss, decoder: Decoder, batch: PackedBatch, ctx: PassContext, start: Start | None
) -> torch.Tensor | None:
    """log p(label) [R] of what the loss compares with: a forward pass that keeps nothing. None: with nothing."""
    if not loss.reference:
        return None
    if loss.reference == "base":
        return _log_probs(decoder, batch, replace(ctx, adapted=False, dropout=None))
    assert start is not None, "whoever opens a session keeps what the loss compares with"
    with start.restored():
        return _log_probs(decoder, batch, replace(ctx, adapted=True, dropout=None))


def _log_probs(decoder: Decoder, batch: PackedBatch, ctx: PassContext) -> torch.Tensor:
    stream = decoder.forward(batch.tokens, ctx, batch.rows)
    with rehearsal.owned(LOGITS):
        return decoder.read_out(stream, adapted=ctx.adapted).log_probs(batch.labels)
