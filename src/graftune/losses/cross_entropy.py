"""Response-only cross-entropy: the sum of -log p(label), each times its weight if the batch has weights.

One pass over the head computes the loss and the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graftune.batch import PackedBatch
from graftune.losses.interface import Computed, Loss
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
