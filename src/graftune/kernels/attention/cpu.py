"""Attention on a CPU: torch's fused kernel (flash_cpu.py), or the reference where that is faster or has no rival."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graftune.kernels import launch
from graftune.kernels.attention import flash_cpu, reference

if TYPE_CHECKING:
    from graftune.kernels.attention import Documents, Grads

SHORT = 128  # average tokens per document below which the fused backward is slower in bf16


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, docs: Documents, scale: float, window: int, out: torch.Tensor,
    cap: float, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Write out; returns the log-sum-exp of the scores [T, N], empty where the backward recomputes it."""
    lengths = _lengths(docs, q)
    if _fused(q, window, cap) and sinks is None:
        return flash_cpu.forward(q, k, v, lengths, scale, out)
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
        flash_cpu.backward(grad_out, q, k, v, out, stats, lengths, scale, grads)
    else:
        reference.backward(grad_out, q, k, v, out, lengths, scale, window, grads, cap, sinks, grad_sinks)


def _lengths(docs: Documents, q: torch.Tensor) -> tuple[int, ...]:
    assert docs.lengths is not None and sum(docs.lengths) == len(q), (docs.lengths, len(q))
    return docs.lengths


def _fused(q: torch.Tensor, window: int, cap: float) -> bool:
    return launch.kind_of(q) == "cpu" and not window and not cap
