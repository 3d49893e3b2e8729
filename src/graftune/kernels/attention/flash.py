"""Packed attention by torch's own flash kernels (the aten operators under `varlen_attn`), on CUDA in bf16 and fp16.

It needs nothing beside torch, captures into CUDA graphs, follows lengths that change between replays, and under
`torch.use_deterministic_algorithms(True)` its backward adds in a fixed order. cuDNN is faster (0.30 + 0.96 against
0.55 + 1.57 ms a layer for 4 documents of 2048 tokens, 32/8 heads of 128, on an H200), so this is the path without it.
q, k and v are read where they lie; the operators allocate their results, which are then copied to their places.
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
    """Why these kernels do not serve such heads; None if they do."""
    if dtype not in (torch.bfloat16, torch.float16):
        return "torch's flash kernels take bf16 and fp16"
    if width % 8 or width > 256:
        return f"torch's flash kernels take heads of up to 256 values, in eights; these have {width}"
    if launch.capability(device) < (8, 0):
        return "torch's flash kernels want compute capability 8.0"
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
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, N, H], log-sum-exp of the scores [N, T])."""
    longest = _longest(docs)
    made, stats, *_ = _forward(
        q, k, v, docs.cu_seqlens, docs.cu_seqlens, longest, longest, 0.0, True, False, scale=scale, **_sides(window)
    )
    return (made if out is None else out.copy_(made)), stats


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
) -> None:
    longest, seqlens = _longest(docs), docs.cu_seqlens
    # Random state of a dropout there is none of: the operator wants the tensors and does not read them.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    found = _backward(
        grad_out, q, k, v, out, stats, seqlens, seqlens, longest, longest, 0.0, True, state, unused,
        scale=scale, **_sides(window),
    )  # fmt: skip
    for grad, value in zip(grads, found, strict=True):
        grad.copy_(value)


def _longest(docs: Documents) -> int:
    """At a bound of 1 the kernel takes a short cut that expects exactly one token a document, empty slots included."""
    return max(docs.longest, 2)


def _sides(window: int) -> dict[str, int]:
    """How many tokens before itself a token sees, and after; by name, for older torch has fewer arguments here."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}
