"""Sum of -log softmax(x W')[label] and its gradient in one pass, over the rows that predict a response token.

Logits exist for one chunk of rows at a time and are overwritten by their own gradient, softmax minus one-hot; sums are
fp32. The mean is left to the caller, who alone knows how many tokens the whole optimizer step has. `scale` multiplies
the gradient while it is still fp32: the loss scale that keeps small values of an fp16 gradient from vanishing.
"""

from __future__ import annotations

from typing import Protocol

import torch

CHUNK_BYTES = 64 << 20  # logits alive at once, counted in fp32; products of this size already run at full speed
CACHE_BYTES = 2 << 20  # of them, the rows a CPU turns into their gradient together: the passes stay in its cache


class Product(Protocol):
    """What the head has to offer: x W', dY W (given x too, for heads with rows that train), and its width."""

    @property
    def out_features(self) -> int: ...
    def matmul(self, x: torch.Tensor) -> torch.Tensor: ...
    def input_grad(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor: ...


def forward(
    x: torch.Tensor,
    head: Product,
    labels: torch.Tensor,
    *,
    need_grad: bool = True,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    total = torch.zeros((), dtype=torch.float32, device=x.device)
    grad = torch.empty_like(x) if need_grad else None
    size = chunk_rows(head.out_features, CHUNK_BYTES)
    step = chunk_rows(head.out_features, CACHE_BYTES) if x.device.type == "cpu" else size
    for start in range(0, len(x), size):
        part, wanted = x[start : start + size], labels[start : start + size]
        logits = head.matmul(part)
        for piece, ids in zip(logits.split(step), wanted.split(step), strict=True):
            total += to_gradient_(piece, ids, scale) if need_grad else loss_of(piece, ids)
        if grad is not None:
            grad[start : start + size] = head.input_grad(logits, part)
        del logits, piece  # or two chunks are alive while the next one is computed
    return total, grad


def to_gradient_(logits: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Overwrites a few rows of logits with softmax minus one-hot, times `scale` (zero where the label is -1); returns
    the sum of their losses."""
    counted = (labels >= 0).unsqueeze(1)
    weight = counted.float() if scale is None else counted * scale
    index = labels.clamp(min=0).unsqueeze(1)
    wide = logits.float()
    chosen = wide.gather(1, index)
    top = wide.amax(1, keepdim=True)
    wide.sub_(top).exp_()
    norm = wide.sum(1, keepdim=True)
    loss = ((top - chosen + norm.log()) * counted).sum()
    wide.mul_(weight / norm)
    wide.scatter_add_(1, index, -weight)
    if wide is not logits:
        logits.copy_(wide)
    return loss


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of the losses alone."""
    wide = logits.float()
    chosen = wide.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    return ((wide.logsumexp(1) - chosen) * (labels >= 0)).sum()


def chunk_rows(vocabulary: int, limit: int) -> int:
    return max(1, limit // (4 * vocabulary))
