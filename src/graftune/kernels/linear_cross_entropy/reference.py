"""Sum of -log softmax(x W')[label] and its gradient in one pass, over the rows that predict a response token.

Logits are stored for one chunk of rows at a time and overwritten by their gradient, softmax minus one-hot; sums are
fp32. The caller computes the mean, because only the caller knows how many tokens the whole optimizer step has. `scale`
multiplies the gradient while it is still fp32: fp16's loss scale, which keeps small gradients from underflowing.
`weights` multiply every row's loss and gradient, and may be negative. With weights equal to minus the derivative of
some loss with respect to each log p(label), the result is that loss's gradient. So any loss on log-probabilities takes
two passes over the head: `log_probs`, then `forward`.

Some families scale and soft-cap their logits: l = c tanh(f z / c) for the product z (without a cap c: l = f z). The
gradient then has the factor f (1 - (l / c)^2).
"""

from __future__ import annotations

from typing import Protocol

import torch

from graftune.kernels import launch, rehearsal

CHUNK_BYTES = 64 << 20  # logits stored at once, counted in fp32; products of this size already run at full speed
CACHE_BYTES = 2 << 20  # logits that a CPU turns into gradients at once, so that they stay in its cache


class HeadProduct(Protocol):
    """The functions of a head: x W', dY W (which gets x too, for heads with trainable rows), and its width."""

    @property
    def out_features(self) -> int: ...
    def matmul(self, x: torch.Tensor) -> torch.Tensor: ...
    def input_grad(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor: ...


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
    total = torch.zeros((), dtype=torch.float32, device=x.device)
    grad = torch.empty_like(x) if need_grad else None
    size = chunk_rows(head.out_features, CHUNK_BYTES)
    step = chunk_rows(head.out_features, CACHE_BYTES) if launch.kind_of(x) == "cpu" else size
    for start in range(0, len(x), size):
        part, wanted = x[start : start + size], labels[start : start + size]
        logits = head.matmul(part)
        for at in rehearsal.few(list(range(0, len(logits), step))):
            piece, ids = logits[at : at + step], wanted[at : at + step]
            own = None if weights is None else weights[start + at : start + at + len(piece)]
            if need_grad:
                total += to_gradient_(piece, ids, scale, factor, cap, own)
            else:
                losses = -log_probs_of(soft_capped(piece.float(), factor, cap), ids)
                total += (losses if own is None else losses * torch.where(ids >= 0, own, 0.0)).sum()
        if grad is not None:
            grad[start : start + size] = head.input_grad(logits, part)
        del logits, piece  # else two chunks are in memory while the next one is computed
    return total, grad


def soft_capped(logits: torch.Tensor, factor: float, cap: float) -> torch.Tensor:
    """Scale and soft-cap the logits in place, for model families that do so."""
    if factor != 1:
        logits.mul_(factor)
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


@launch.operation("cross-entropy")
def to_gradient_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    scale: torch.Tensor | None = None,
    factor: float = 1.0,
    cap: float = 0.0,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Overwrite rows of logits with softmax minus one-hot, times `scale` and the row's weight (0 where the label is
    -1). Returns the weighted sum of their losses."""
    counted = (labels >= 0).unsqueeze(1)
    own = counted if weights is None else torch.where(counted, weights.unsqueeze(1), 0.0)
    weight = own.float() if scale is None else own * scale
    index = labels.clamp(min=0).unsqueeze(1)
    logits32 = soft_capped(logits.float(), factor, cap)
    slope = logits32.div(cap).square_().neg_().add_(1) if cap else None
    chosen = logits32.gather(1, index)
    top = logits32.amax(1, keepdim=True)
    logits32.sub_(top).exp_()
    norm = logits32.sum(1, keepdim=True)
    loss = ((top - chosen + norm.log()) * own).sum()
    logits32.mul_(weight / norm)
    logits32.scatter_add_(1, index, -weight)
    if slope is not None:
        logits32.mul_(slope)
    if factor != 1:
        logits32.mul_(factor)
    if logits32 is not logits:
        logits.copy_(logits32)
    return loss


def log_probs(
    x: torch.Tensor, head: HeadProduct, labels: torch.Tensor, *, factor: float = 1.0, cap: float = 0.0
) -> torch.Tensor:
    found = torch.empty(len(x), dtype=torch.float32, device=x.device)
    size = chunk_rows(head.out_features, CHUNK_BYTES)
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        found[part] = log_probs_of(soft_capped(head.matmul(x[part]).float(), factor, cap), labels[part])
    return found


@launch.operation("cross-entropy")
def log_probs_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log softmax(logits)[label] of every row, 0 where the label is -1."""
    logits32 = logits.float()
    chosen = logits32.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    return (chosen - logits32.logsumexp(1)) * (labels >= 0)


def chunk_rows(vocabulary: int, limit: int) -> int:
    return max(1, limit // (4 * vocabulary))
