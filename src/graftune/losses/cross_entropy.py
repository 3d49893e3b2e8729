"""Response-only cross-entropy: the sum of -log p(label), each times its weight if the batch has weights. One pass over
the head computes the loss and the gradient.

Anchored: with a penalty that keeps the predictions of the labels close to those of the base model.

    loss = sum over labels of  -w log p(label) + anchor (log p(label) - log p_base(label))^2

p_base is the same model with adapters off, from a second forward pass over the same batch. A penalty on the labels
alone needs one number per row; a divergence over the whole vocabulary would need the base's logits as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from graftune.batch import PackedBatch
from graftune.losses.interface import Computed, LogProbLoss, Loss
from graftune.model.head import Output


class CrossEntropy(Loss):
    def __call__(
        self,
        output: Output,
        batch: PackedBatch,
        reference: torch.Tensor | None = None,
        *,
        scale: torch.Tensor | None = None,
        need_grad: bool = True,
    ) -> Computed:
        weights = batch.extra.get("weights")
        return Computed(*output.cross_entropy(batch.labels, weights=weights, need_grad=need_grad, scale=scale))

    def cross_entropy(self, loss: float, figures: Mapping[str, float]) -> float:
        return loss


class Anchored(LogProbLoss):
    figures = ("cross_entropy", "drift")  # drift: the squared difference, so that loss = cross_entropy + anchor drift
    better: Mapping[str, Literal["higher", "lower"]] = {"cross_entropy": "lower", "drift": "lower"}
    reference = "base"

    def __init__(self, anchor: float):
        self.anchor = anchor

    def of_log_probs(
        self, log_probs: torch.Tensor, reference: torch.Tensor | None, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert reference is not None, "the step passes the base's log-probabilities"
        weights, moved = batch.extra.get("weights"), log_probs - reference
        weighted = log_probs if weights is None else log_probs * weights
        figures = torch.stack((-weighted.sum(), moved.square().sum()))
        return figures[0] + self.anchor * figures[1], figures
