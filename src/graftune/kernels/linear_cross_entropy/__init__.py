"""The LM head and its cross-entropy on the rows that predict response tokens, without storing all logits at once.

reference.py has the formulas."""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.linear_cross_entropy import reference
from graftune.kernels.linear_cross_entropy.reference import HeadProduct, soft_capped

__all__ = ["HeadProduct", "forward", "log_probs", "soft_capped"]


def forward(
    x: torch.Tensor,
    head: HeadProduct,
    labels: torch.Tensor,
    *,
    need_grad: bool = True,
    scale: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    factor: float = 1.0,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [R, D], labels [R] (-1: not counted) -> (sum of losses, an fp32 scalar; gradient of x times `scale`, or None).
    `weights` [R] in fp32 multiply each row's loss and gradient. The logits are the product times `factor`, soft-capped
    at `cap` if it is not 0."""
    assert labels.shape == x.shape[:1] and (scale is None or (scale.dim() == 0 and scale.dtype == torch.float32))
    assert weights is None or (weights.shape == labels.shape and weights.dtype == torch.float32)
    return launch.implementation(reference, x).forward(
        x, head, labels, need_grad=need_grad, scale=scale, weights=weights, factor=factor, cap=cap
    )


def log_probs(
    x: torch.Tensor, head: HeadProduct, labels: torch.Tensor, *, factor: float = 1.0, cap: float = 0.0
) -> torch.Tensor:
    """x [R, D], labels [R] -> log p(label) [R] in fp32, 0 where the label is -1. Saves nothing for a backward."""
    assert labels.shape == x.shape[:1]
    return launch.implementation(reference, x).log_probs(x, head, labels, factor=factor, cap=cap)
