"""What libraries allocate for a moment, or for good, where no code of ours is to be rehearsed: formulas, held against
what they took on a GPU (benchmarks/plan.py)."""

from __future__ import annotations

from typing import Any

import torch

from graftune.plan.ledger import MIB

CUBLAS = 32 * MIB  # by torch, for each stream that ever multiplied


def workspace_bytes(shape: Any) -> int:
    """Of one of cuDNN's attention plans (`cudnn_frontend.Shape`). Forward: none to speak of. Backward: dq summed in
    fp32, the row sums of the softmax, and with grouped heads dk and dv of every query head before they are added."""
    if shape.grad_strides is None:
        return 0
    tokens = -(-shape.tokens // 64) * 64
    values = tokens * shape.heads * shape.width
    grouped = shape.heads != shape.key_heads
    return 4 * values * (3 if grouped else 1) + 4 * tokens * shape.heads


def flash_bytes(args: tuple[Any, ...]) -> int:
    """What torch's flash backward allocates inside: dq in fp32 and row sums, with room for a tile a document, and with
    grouped heads dk and dv of every query head."""
    _, q, k, _, _, _, cu_seqlens = args[:7]
    tokens, heads, width = q.shape
    padded = tokens + 128 * (len(cu_seqlens) - 1)
    grouped = 2 * tokens * heads * width * q.element_size() if heads != k.shape[1] else 0
    return 4 * padded * heads * (width + 1) + grouped


def index_bytes(args: tuple[Any, ...]) -> int:
    """What torch allocates on CUDA to index by several tensors at once: each of them written out for every value."""
    indices = [index for index in args[1] if index is not None]
    many = torch.broadcast_shapes(*(index.shape for index in indices)).numel()
    return 8 * many * len(indices) if len({index.shape for index in indices}) > 1 else 0
