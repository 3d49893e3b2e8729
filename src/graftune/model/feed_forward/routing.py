"""Statistics of a model's routers in an optimizer step: sums that stay on the device until the step's report is read.

A forward pass of training has a `RoutingPass` in its context. Padding is not counted; the last layer computes only the
rows that predict something, so it counts those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from graftune.kernels import routing
from graftune.model.feed_forward.experts import ExpertsSpec
from graftune.model.spec import ModelSpec

FIGURES = ("router_entropy", "busiest_expert", "idle_experts")  # of every step, over all layers


class LayerRouting(NamedTuple):
    layer: int
    tokens: list[int]  # of each expert
    entropy: float  # mean over tokens, relative to that of equal scores: 0 is certain, 1 undecided


class RoutingSums:
    """Sums for each layer that has experts; `numbers` of them go into a step's report."""

    def __init__(self, spec: ModelSpec, device: torch.device):
        parts = ((index, part) for index, layer in enumerate(spec.layers) for part in layer.parts)
        self.experts = {index: part.experts for index, part in parts if isinstance(part, ExpertsSpec)}
        self.width = max(self.experts.values()) + 2
        self.numbers = len(self.experts) * self.width
        self.sums = torch.zeros(len(self.experts), routing.PARTS, self.width, device=device)
        self.place = {layer: place for place, layer in enumerate(self.experts)}

    def take(self, out: torch.Tensor) -> None:
        """Write the sums to a step's report and zero them."""
        out.copy_(self.sums.sum(1).flatten())
        self.sums.zero_()

    def read(self, report: Sequence[float]) -> list[LayerRouting]:
        """The numbers that `take` wrote, after the report was fetched."""
        found = []
        for layer, place in self.place.items():
            *tokens, entropy, total = report[place * self.width : (place + 1) * self.width]
            count = self.experts[layer]
            most = math.log(count) * total
            found.append(LayerRouting(layer, [round(n) for n in tokens[:count]], entropy / most if most else 0.0))
        return found


class RoutingPass(NamedTuple):
    """Observes the choices of routers in one pass: its sums, and which of its tokens count."""

    sums: RoutingSums
    counted: torch.Tensor  # [T] bool
    counted_rows: torch.Tensor  # [R] bool, of the rows that predict something

    @staticmethod
    def of(sums: RoutingSums, tokens: int, rows: torch.Tensor, labels: torch.Tensor) -> RoutingPass:
        """Documents lie end to end before the padding: a token up to the last row that predicts something is real."""
        trained = labels >= 0
        last = (rows * trained).amax()
        return RoutingPass(sums, torch.arange(tokens, device=rows.device) <= last, trained)

    def add(self, layer: int, scores: torch.Tensor, chosen: torch.Tensor, only_rows: bool) -> None:
        """scores [T, E] and chosen [T, k] of a layer. `only_rows`: of the rows that predict something."""
        counted = self.counted_rows if only_rows else self.counted
        routing.add_(self.sums.sums[self.sums.place[layer]], scores, chosen, counted)


def figures_of(layers: Sequence[LayerRouting]) -> dict[str, float]:
    """Over all layers: the mean entropy; the busiest expert's tokens relative to an equal share, and the share of
    experts without tokens, both of the worst layer."""
    loads = [(max(one.tokens), sum(one.tokens), one.tokens.count(0), len(one.tokens)) for one in layers]
    busiest = max((most * count / total for most, total, _, count in loads if total), default=0.0)
    idle = max((none / count for _, total, none, count in loads if total), default=0.0)
    values = (sum(one.entropy for one in layers) / max(1, len(layers)), busiest, idle)
    return dict(zip(FIGURES, values, strict=True))
