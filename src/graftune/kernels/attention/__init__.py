"""Packed causal attention with grouped heads. q [T, N, H], k and v [T, K, H]; documents given by their lengths.

The CPU has torch's fused kernel; other devices, and windowed layers, take the reference. `stats` is what the forward
leaves for the backward: the log-sum-exp of the scores, empty where the path recomputes it.
"""

from __future__ import annotations

import torch

from graftune.kernels.attention import flash_cpu, reference

SHORT = 128  # tokens of an average document below which the fused backward loses in bf16


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], scale: float, window: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    assert sum(lengths) == len(q) and q.shape[1] % k.shape[1] == 0, (lengths, q.shape, k.shape)
    if _fused(q, window):
        return flash_cpu.forward(q, k, v, lengths, scale)
    return reference.forward(q, k, v, lengths, scale, window), q.new_empty(0)


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    short = q.dtype == torch.bfloat16 and sum(lengths) < SHORT * len(lengths)
    if _fused(q, window) and not short:
        return flash_cpu.backward(grad_out, q, k, v, out, stats, lengths, scale)
    return reference.backward(grad_out, q, k, v, out, lengths, scale, window)


def _fused(q: torch.Tensor, window: int) -> bool:
    return q.device.type == "cpu" and not window
