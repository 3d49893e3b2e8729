"""One launch for each chunk, between the head's two products. A program reads a row of logits once for its maximum and
its sum of exponentials (an online softmax), and once more to overwrite it with its gradient. Apart from the logits it
writes one loss per row; the losses are summed at the end, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.arithmetic import ceil_div
from graftune.kernels import launch
from graftune.kernels.linear_cross_entropy.reference import HeadProduct

CHUNK_BYTES = 512 << 20  # logits stored at once, in their own dtype: few and large products
CHUNK_STEP = 128  # a chunk is a multiple of the product's tile
LONGEST_BLOCK = 8192


@triton.jit
def _soft_capped(x, factor, FACTOR: tl.constexpr, CAP: tl.constexpr):
    """Scale and soft-cap the logits, for model families that do so."""
    if FACTOR:
        x = x * factor
    if CAP > 0:
        x = CAP - 2 * CAP / (1.0 + tl.exp(x * (2.0 / CAP)))
    return x


@launch.kernel
def _rows(
    logits_ptr, labels_ptr, losses_ptr, scale_ptr, weights_ptr, stride, width, factor,
    NEED_GRAD: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_WEIGHTS: tl.constexpr, FACTOR: tl.constexpr,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """logits[row] <- scale * (softmax(logits[row]) - onehot(label)); losses[row] = -log softmax(logits[row])[label];
    both times the row's weight."""
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * stride
    label = tl.load(labels_ptr + row)
    cols = tl.arange(0, BLOCK)
    if label >= 0:
        chosen = _soft_capped(tl.load(base + label).to(tl.float32), factor, FACTOR, CAP)  # before it is overwritten
        top = -3.0e38  # not -inf: inf - inf is no number
        norm = 0.0
        for start in range(0, width, BLOCK):
            inside = start + cols < width
            x = _soft_capped(tl.load(base + start + cols, inside, other=0.0).to(tl.float32), factor, FACTOR, CAP)
            x = tl.where(inside, x, float("-inf"))
            higher = tl.maximum(top, tl.max(x, 0))
            norm = norm * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
        loss = (top - chosen) + tl.log(norm)
        if HAS_WEIGHTS:
            loss *= tl.load(weights_ptr + row)
        tl.store(losses_ptr + row, loss)
        if NEED_GRAD:
            weight = 1.0
            if HAS_SCALE:
                weight = tl.load(scale_ptr)
            if HAS_WEIGHTS:
                weight *= tl.load(weights_ptr + row)
            share = weight / norm
            for start in range(0, width, BLOCK):
                at = start + cols
                x = _soft_capped(tl.load(base + at, at < width, other=0.0).to(tl.float32), factor, FACTOR, CAP)
                grad = tl.exp(tl.where(at < width, x, float("-inf")) - top) * share - tl.where(at == label, weight, 0.0)
                if CAP > 0:
                    grad *= 1.0 - (x / CAP) * (x / CAP)
                if FACTOR:
                    grad *= factor
                tl.store(base + at, grad.to(logits_ptr.dtype.element_ty), at < width)
    else:
        tl.store(losses_ptr + row, 0.0)
        if NEED_GRAD:
            for start in range(0, width, BLOCK):
                nothing = tl.zeros([BLOCK], logits_ptr.dtype.element_ty)
                tl.store(base + start + cols, nothing, start + cols < width)


def forward(
    x: torch.Tensor,
    head: HeadProduct,
    labels: torch.Tensor,
    *,
    need_grad: bool,
    scale: torch.Tensor | None,
    weights: torch.Tensor | None = None,
    factor: float = 1.0,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    losses, grad = _one_pass(x, head, labels, need_grad, scale=scale, weights=weights, factor=factor, cap=cap)
    return losses.sum(), grad


def log_probs(
    x: torch.Tensor, head: HeadProduct, labels: torch.Tensor, *, factor: float = 1.0, cap: float = 0.0
) -> torch.Tensor:
    return _one_pass(x, head, labels, False, factor=factor, cap=cap)[0].neg_()


def _one_pass(
    x: torch.Tensor,
    head: HeadProduct,
    labels: torch.Tensor,
    need_grad: bool,
    *,
    scale: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    factor: float,
    cap: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One pass over the head: the loss of every row [R] and, with `need_grad`, the gradient of x."""
    losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
    grad = torch.empty_like(x) if need_grad else None
    size = chunk_rows(len(x), head.out_features * x.element_size())
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        logits = head.matmul(x[rows])
        own = None if weights is None else weights[rows]
        to_gradient_(
            logits, labels[rows], losses[rows], need_grad=need_grad, scale=scale, weights=own, factor=factor, cap=cap
        )
        if grad is not None:
            grad[rows] = head.input_grad(logits, x[rows])
        del logits  # else two chunks are in memory while the next one is computed
    return losses, grad


@launch.operation("cross-entropy")
def to_gradient_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    losses: torch.Tensor,
    *,
    need_grad: bool = True,
    scale: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    factor: float = 1.0,
    cap: float = 0.0,
) -> None:
    """Fill `losses` [rows] and, with `need_grad`, overwrite logits [rows, V] with their gradient."""
    assert logits.stride(1) == 1 and labels.is_contiguous() and losses.is_contiguous()
    assert weights is None or weights.is_contiguous()
    rows, width = logits.shape
    block = min(LONGEST_BLOCK, launch.power_of_two(width))
    _rows[(rows,)](
        logits, labels, losses, scale, weights, logits.stride(0), width, factor, NEED_GRAD=need_grad,
        HAS_SCALE=scale is not None, HAS_WEIGHTS=weights is not None, FACTOR=factor != 1.0, CAP=float(cap), BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
    )  # fmt: skip


def chunk_rows(rows: int, row_bytes: int) -> int:
    """Rows per chunk: as few chunks as the limit allows, equal except for the last. Depends on the shape only."""
    most = max(1, CHUNK_BYTES // row_bytes // CHUNK_STEP) * CHUNK_STEP
    count = max(1, ceil_div(rows, most))
    return max(1, ceil_div(ceil_div(rows, count), CHUNK_STEP)) * CHUNK_STEP
