"""Sum of -log softmax(x W')[label] and its gradient in one pass, over the rows that predict a response token.

Logits exist for one chunk of rows at a time and are overwritten by their own gradient, softmax minus one-hot; sums are
fp32. The mean is left to the caller, who alone knows how many tokens the whole optimizer step has.
"""

from __future__ import annotations

from typing import Protocol

import torch

CHUNK_BYTES = 64 << 20  # fp32 logits alive at once; products of this size already run at full speed


class Product(Protocol):
    """What the head has to offer: x W', dY W (given x too, for heads with rows that train), and its width."""

    @property
    def out_features(self) -> int: ...
    def matmul(self, x: torch.Tensor) -> torch.Tensor: ...
    def input_grad(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor: ...


def forward(
    x: torch.Tensor, head: Product, labels: torch.Tensor, *, need_grad: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [R, D], labels [R] (-1: not counted) -> (loss sum, fp32 scalar; gradient of x or None)."""
    total = torch.zeros((), dtype=torch.float32, device=x.device)
    grad = torch.empty_like(x) if need_grad else None
    size = chunk_rows(head.out_features)
    for start in range(0, len(x), size):
        part, wanted = x[start : start + size], labels[start : start + size]
        counted = wanted >= 0
        logits = head.matmul(part).float()
        index = wanted.clamp(min=0).unsqueeze(1)
        lse = torch.logsumexp(logits, 1, keepdim=True)
        total += ((lse - logits.gather(1, index)).squeeze(1) * counted).sum()
        if grad is not None:
            probabilities = logits.sub_(lse).exp_()
            probabilities.scatter_add_(1, index, torch.full_like(lse, -1.0))
            probabilities.mul_(counted.unsqueeze(1))
            grad[start : start + size] = head.input_grad(probabilities.to(x.dtype), part)
    return total, grad


def chunk_rows(vocabulary: int) -> int:
    return max(1, CHUNK_BYTES // (4 * vocabulary))
