"""What a loss is to the rest of the package.

A loss says what its batches hold (`layout`), which figures it reports, and whether it wants the base's own predictions.
Called with the decoder's output it returns a sum over the batch and the gradient of the output's rows. It never
divides: the one division, by the layout's shares over the whole optimizer step, is the step's, so that N micro-batches
equal one. It reads nothing back and launches the same kernels for every batch of a shape, so that the step can be
captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from graftune.batch import PLAIN, BatchLayout, Example, Field, PackedBatch
from graftune.data.encoded import has_weights, weight_sums_of, weights_of
from graftune.kernels import rehearsal
from graftune.kernels.rehearsal import LOGITS
from graftune.model.context import PassContext
from graftune.model.decoder import Decoder
from graftune.model.head import Output

# Divided by the sum of weights: a weight says how much a token counts beside others, not how large a step is.
WEIGHTED = BatchLayout(fields=(Field("weights", torch.float32, weights_of),), shares=weight_sums_of)


class Computed(NamedTuple):
    """What a loss makes of one micro-batch: sums, all on the device."""

    total: torch.Tensor  # 0-dim fp32
    grad: torch.Tensor | None  # of `Output.normed`, times the loss scale; None where none was asked for
    figures: torch.Tensor | None = None  # [len(Loss.figures)] fp32


class Loss(ABC):
    figures: tuple[str, ...] = ()  # names of what is reported beside the loss, divided as the loss is
    needs_base: bool = False  # log-probabilities with adapters off: one more forward pass per micro-batch

    def layout(self, examples: Sequence[Example]) -> BatchLayout:
        """What batches of these examples hold beside the labels, and what the loss is divided by."""
        return WEIGHTED if has_weights(examples) else PLAIN

    @abstractmethod
    def __call__(
        self,
        output: Output,
        batch: PackedBatch,
        base: torch.Tensor | None = None,
        *,
        scale: torch.Tensor | None = None,
        need_grad: bool = True,
    ) -> Computed:
        """`base` [R] fp32: log p(label) with adapters off, where the loss needs it. `scale`: fp16's loss scale, which
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
        self, log_probs: torch.Tensor, base: torch.Tensor | None, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """log p(label) [R], 0 where a row is padding -> (sum, its derivative by every log p [R], figures)."""

    def __call__(
        self,
        output: Output,
        batch: PackedBatch,
        base: torch.Tensor | None = None,
        *,
        scale: torch.Tensor | None = None,
        need_grad: bool = True,
    ) -> Computed:
        total, slopes, figures = self.of_log_probs(output.log_probs(batch.labels), base, batch)
        grad = output.grad_of(batch.labels, slopes, scale) if need_grad else None
        return Computed(total, grad, figures)


def base_log_probs(decoder: Decoder, batch: PackedBatch, run: PassContext) -> torch.Tensor:
    """log p(label) [R] with adapters off, for a loss that needs it: a forward pass that keeps nothing."""
    stream = decoder.forward(batch.tokens, replace(run, adapted=False, dropout=None), batch.rows)
    with rehearsal.owned(LOGITS):
        return decoder.read_out(stream, adapted=False).log_probs(batch.labels)
