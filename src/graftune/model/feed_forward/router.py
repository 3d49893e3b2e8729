"""The router of a mixture: chooses k of E experts for each token and weighs them, forward and backward.

    z = n R' + b                      n: the normed stream, b: a bias, where the family has one
    s = softmax(z) or sigmoid(z)      chosen = the k largest of s, or of s + c (c: a bias of the choice alone)
    v = s[chosen]                     w = scale * v, or scale * v / (sum(v) + eps), times a factor of each expert's own

Gemma 4's router reads the stream through a norm without weight, in place of n, and multiplies it by a vector.

A softmax over the chosen logits alone (gpt-oss) equals the softmax over all of them with normalised weights, so it
needs no code of its own. Everything is computed in fp32, so that the choice does not depend on how logits were rounded.
The router is frozen; its gradient goes on to the stream. The choice has no gradient.

Legend: T tokens, D width, E experts, k chosen a token, S = T k rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from graftune import spans
from graftune.kernels import launch
from graftune.kernels.experts import Starts
from graftune.model.part import PartPlacer


@dataclass(frozen=True)
class RouterSpec:
    """The kind of router. Tensor names are those after the mixture's module."""

    normalised: bool = True  # whether the weights of a token's experts sum to one, before `scale`
    score: str = "softmax"  # softmax | sigmoid
    bias: bool = False  # of the logits
    selection_bias: str = ""  # a tensor [E] that is added to the scores for the choice alone; "": none
    scale: float = 1.0  # of the weights
    eps: float = 0.0  # added to the sum that normalised weights are divided by
    name: str = "gate"  # the module
    input_scale: str = ""  # a tensor [D] that multiplies the input, which is divided by sqrt(D), too; "": none
    expert_scale: str = ""  # a tensor [E] of factors of the weights; "": none

    def tensors(self, experts: int, width: int) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {f"{self.name}.weight": (experts, width)}
        if self.bias:
            found[f"{self.name}.bias"] = (experts,)
        scales = {self.selection_bias: experts, self.input_scale: width, self.expert_scale: experts}
        return found | {name: (size,) for name, size in scales.items() if name}

    def build(self, place: PartPlacer, chosen: int) -> Router:
        weight = place.tensor(f"{self.name}.weight")[0]
        if self.input_scale:
            weight = weight * (place.tensor(self.input_scale)[0] * weight.shape[1] ** -0.5)
        return Router(
            spec=self,
            chosen=chosen,
            weight=weight,
            bias=place.tensor(f"{self.name}.bias")[0] if self.bias else None,
            selection_bias=place.tensor(self.selection_bias)[0] if self.selection_bias else None,
            expert_scale=place.tensor(self.expert_scale)[0] if self.expert_scale else None,
        )


class Routed(NamedTuple):
    """Which experts the tokens go to. Every choice is a row; rows are sorted by expert."""

    scores: torch.Tensor  # [T, E] fp32
    chosen: torch.Tensor  # [T, k]
    weights: torch.Tensor  # [T, k] fp32
    tokens: torch.Tensor  # [S] the token of each row
    places: torch.Tensor  # [T, k] the row of each choice
    starts: Starts


@dataclass
class Router:
    spec: RouterSpec
    chosen: int  # k
    weight: torch.Tensor  # [E, D] fp32, times the scale of the input
    bias: torch.Tensor | None  # [E] fp32
    selection_bias: torch.Tensor | None  # [E] fp32
    expert_scale: torch.Tensor | None = None  # [E] fp32

    def forward(self, normed: torch.Tensor) -> Routed:
        spans.operation("router")
        scores, chosen, weights = self._choose(normed.float())
        ordered, rows = chosen.flatten().sort(stable=True)
        places = torch.empty_like(rows).scatter_(0, rows, torch.arange(len(rows), device=rows.device))
        numbers = torch.arange(len(self.weight) + 1, device=rows.device)
        at = torch.searchsorted(ordered, numbers, out_int32=True)
        host = tuple(int(n) for n in at) if launch.kind_of(at) == "cpu" else None
        tokens = rows.div(self.chosen, rounding_mode="floor")
        return Routed(scores, chosen, weights, tokens, places.view_as(chosen), Starts(at, host))

    def _choose(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(scores, chosen, weights) of `Routed`."""
        spec, transposed = self.spec, self.weight.t()
        logits = normed @ transposed if self.bias is None else torch.addmm(self.bias, normed, transposed)
        scores = torch.sigmoid(logits) if spec.score == "sigmoid" else torch.softmax(logits, 1)
        if self.selection_bias is None:
            weights, chosen = scores.topk(self.chosen, 1)
        else:
            chosen = (scores + self.selection_bias).topk(self.chosen, 1).indices
            weights = scores.gather(1, chosen)
        if spec.normalised:
            weights = weights / self._total(weights)
        weights = weights if spec.scale == 1 else weights.mul_(spec.scale)
        return scores, chosen, weights if self.expert_scale is None else weights * self.expert_scale[chosen]

    def _total(self, chosen_scores: torch.Tensor) -> torch.Tensor:
        """The divisor of normalised weights, [T, 1]."""
        total = chosen_scores.sum(1, keepdim=True)
        return total.add_(self.spec.eps) if self.spec.eps else total

    def backward(self, grad_weights: torch.Tensor, routed: Routed) -> torch.Tensor:
        """d weights [T, k] -> d normed [T, D], fp32."""
        spec, chosen = self.spec, routed.scores.gather(1, routed.chosen)
        grad = grad_weights if self.expert_scale is None else grad_weights * self.expert_scale[routed.chosen]
        if spec.normalised:
            mean = (grad_weights * routed.weights).sum(1, keepdim=True)
            grad = ((grad if spec.scale == 1 else grad * spec.scale) - mean) / self._total(chosen)
        elif spec.scale != 1:
            grad = grad * spec.scale
        grad_logits = torch.zeros_like(routed.scores)
        if spec.score == "sigmoid":
            return grad_logits.scatter_(1, routed.chosen, grad * chosen * (1 - chosen)) @ self.weight
        inner = (grad * chosen).sum(1, keepdim=True)
        return grad_logits.scatter_(1, routed.chosen, grad).sub_(inner).mul_(routed.scores) @ self.weight
