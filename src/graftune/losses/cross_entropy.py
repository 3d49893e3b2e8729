"""Response-only cross-entropy: the sum of -log p(label), each times its weight where the data has weights.

Loss and gradient come from one pass over the head. Without weights nothing is read or multiplied for them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graftune.batch import PLAIN, BatchLayout, Field, PackedBatch
from graftune.data.encoded import weight_sums_of, weights_of
from graftune.losses.interface import Computed, Loss
from graftune.model.head import Output

# Divided by the sum of weights: a weight says how much a token counts beside others, not how large a step is.
WEIGHTED = BatchLayout(fields=(Field("weights", torch.float32, weights_of),), shares=weight_sums_of)


class CrossEntropy(Loss):
    def __init__(self, weighted: bool = False):
        self.weighted = weighted
        self.layout = WEIGHTED if weighted else PLAIN

    def __call__(
        self,
        output: Output,
        batch: PackedBatch,
        base: torch.Tensor | None = None,
        *,
        scale: torch.Tensor | None = None,
        need_grad: bool = True,
    ) -> Computed:
        weights = batch.extra["weights"] if self.weighted else None
        return Computed(*output.cross_entropy(batch.labels, weights=weights, need_grad=need_grad, scale=scale))

    def cross_entropy(self, loss: float, figures: Mapping[str, float]) -> float:
        return loss
