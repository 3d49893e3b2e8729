"""Packed attention by torch's flash kernels (the aten operators that `varlen_attn` calls), on CUDA in bf16 and fp16.

They need no package besides torch, can be captured in CUDA graphs, read the lengths anew at every replay, and under
`torch.use_deterministic_algorithms(True)` their backward sums in a fixed order. cuDNN is faster (0.30 + 0.96 instead of
0.55 + 1.57 ms per layer for 4 documents of 2048 tokens, 32/8 heads of 128, on an H200), so they serve where cuDNN
cannot. q, k and v are read in place; the operators allocate their results, which are then copied to the caller's
tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graftune.kernels import launch
from graftune.private import find

if TYPE_CHECKING:
    from graftune.kernels.attention import Documents

_forward = find("torch.ops.aten._flash_attention_forward.default")
_backward = find("torch.ops.aten._flash_attention_backward.default")


def lacks(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Why these kernels cannot compute such heads; None if they can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return "torch's flash kernels take bf16 and fp16"
    if width % 8 or width > 256:
        return f"torch's flash kernels take heads of up to 256 values, in eights; these have {width}"
    if launch.capability(device) < (8, 0):
        return "torch's flash kernels need compute capability 8.0"
    if not launch.is_elsewhere(device) and not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without its flash kernels"
    return None


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    docs: Documents,
    scale: float,
    window: int,
    out: torch.Tensor,
    cap: float,
) -> torch.Tensor:
    """Write out [T, N, H]; returns the log-sum-exp of the scores [N, T]."""
    assert not window and not cap, "windows and soft caps are our own kernels'"
    longest = _longest(docs)
    made, stats, *_ = _forward(
        q, k, v, docs.cu_seqlens, docs.cu_seqlens, longest, longest, 0.0, True, False, scale=scale
    )
    out.copy_(made)
    return stats


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    docs: Documents,
    scale: float,
    window: int,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cap: float,
) -> None:
    assert not window and not cap, "windows and soft caps are our own kernels'"
    longest, seqlens = _longest(docs), docs.cu_seqlens
    # The operator requires dropout's random state and does not read it: there is no dropout.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    found = _backward(
        grad_out, q, k, v, out, stats, seqlens, seqlens, longest, longest, 0.0, True, state, unused,
        scale=scale,
    )  # fmt: skip
    for grad, value in zip(grads, found, strict=True):
        grad.copy_(value)


def _longest(docs: Documents) -> int:
    """A bound of at least 2: with 1, the kernel expects exactly one token in every document, even in empty slots."""
    return max(docs.longest, 2)
