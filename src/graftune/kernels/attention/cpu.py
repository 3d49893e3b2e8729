"""Attention on a CPU: torch's fused kernel, one document at a time, or the reference.

In the fused kernel scores stay in the CPU's cache; their log-sum-exp is saved for the backward. It needs as many key
heads as query heads, so keys are repeated and their gradients summed, and it has no window, soft cap or sinks. Its
backward is faster than the reference in fp32 (16 instead of 31 ms per layer for 16 documents of 64 tokens on two
Neoverse cores) and for long documents in bf16. For short documents in bf16 it is slower (23 instead of 9 ms on two AMX
cores), and the reference computes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graftune.kernels import launch
from graftune.kernels.attention import reference
from graftune.private import find

if TYPE_CHECKING:
    from graftune.kernels.attention import Documents, Grads

_flash_forward = find("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu")
_flash_backward = find("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")
SHORT = 128  # average tokens per document below which the fused backward is slower in bf16


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, docs: Documents, scale: float, window: int, out: torch.Tensor,
    cap: float, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Write out; returns the log-sum-exp of the scores [T, N], empty where the backward recomputes it."""
    lengths = _lengths(docs, q)
    if _fused(q, window, cap) and sinks is None:
        return _fused_forward(q, k, v, lengths, scale, out)
    reference.forward(q, k, v, lengths, scale, window, out, cap, sinks)
    return q.new_empty(0)


def backward(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, stats: torch.Tensor,
    docs: Documents, scale: float, window: int, grads: Grads, cap: float, sinks: torch.Tensor | None = None,
    grad_sinks: torch.Tensor | None = None,
) -> None:  # fmt: skip
    lengths = _lengths(docs, q)
    short = q.dtype == torch.bfloat16 and len(q) < SHORT * sum(length > 0 for length in lengths)
    if _fused(q, window, cap) and not short and sinks is None:
        _fused_backward(grad_out, q, k, v, out, stats, lengths, scale, grads)
    else:
        reference.backward(grad_out, q, k, v, out, lengths, scale, window, grads, cap, sinks, grad_sinks)


def _lengths(docs: Documents, q: torch.Tensor) -> tuple[int, ...]:
    assert docs.lengths is not None and sum(docs.lengths) == len(q), (docs.lengths, len(q))
    return docs.lengths


def _fused(q: torch.Tensor, window: int, cap: float) -> bool:
    return launch.kind_of(q) == "cpu" and not window and not cap


def _fused_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], scale: float, out: torch.Tensor
) -> torch.Tensor:
    """q [T, N, H], k and v [T, K, H] -> out [T, N, H]; returns the log-sum-exp of the scores [T, N]."""
    stats = torch.empty(q.shape[:2])
    for start, stop in reference.documents(lengths):
        place = slice(start, stop)
        part, lse = _flash_forward(*_batched(q[place], k[place], v[place]), 0.0, True, scale=scale)
        out[place], stats[place] = part[0].transpose(0, 1), lse[0].view(q.shape[1], -1).t()
    return stats


def _fused_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Write dq, dk and dv to `grads`, of the shapes of q, k and v."""
    group = q.shape[1] // k.shape[1]
    for start, stop in reference.documents(lengths):
        place = slice(start, stop)
        q_, k_, v_ = _batched(q[place], k[place], v[place])
        do, o = (x[place].transpose(0, 1).unsqueeze(0) for x in (grad_out, out))
        lse = stats[place].t().contiguous().unsqueeze(0)
        dq, dk, dv = _flash_backward(do, q_, k_, v_, o, lse, 0.0, True, scale=scale)
        grads[0][place] = dq[0].transpose(0, 1)
        for grad, per_query_head in ((grads[1], dk), (grads[2], dv)):
            in_groups = per_query_head[0].view(-1, group, stop - start, per_query_head.shape[-1])
            grad[place] = in_groups.sum(1).transpose(0, 1)


def _batched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[L, N, H] and [L, K, H] -> three of [1, N, L, H]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.transpose(0, 1).repeat_interleave(group, 0).unsqueeze(0) for x in (k, v))
    return q.transpose(0, 1).unsqueeze(0), k, v
