"""The memory that libraries allocate internally, which a rehearsal of our code cannot see: formulas, compared with
measurements on a GPU (benchmarks/plan.py). `TAKEN` is indexed by the name of a call in our code; `OnGpu.before` and
`copied_weight` (on a CPU) are called before each of torch's operations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from graftune import graph
from graftune.arithmetic import ceil_div
from graftune.kernels.rehearsal import META, WORKSPACES
from graftune.observe.memory import forget_peak, peak_resident_bytes, resident_bytes
from graftune.plan.counting import MIB, Tally
from graftune.plan.shapes import broadcast
from graftune.private import find

aten = torch.ops.aten
_FLASH_BACKWARD = find("torch.ops.aten._flash_attention_backward.default")
CUBLAS = 32 * MIB  # allocated by torch for each stream that multiplies
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addmm_}
GPU_PRODUCTS = {*PRODUCTS, find("torch.ops.aten._scaled_mm")}
ENOUGH_ROWS = 16  # rows of x from which on the libraries copy a weight


def workspace_bytes(shape: Any) -> int:
    """The workspace of one of cuDNN's attention plans (`cudnn_frontend.CudnnShape`). Forward: nearly nothing.
    Backward: dq summed in fp32, the row sums of the softmax, and with grouped heads dk and dv of every query head
    before they are added."""
    if shape.grad_strides is None:
        return 0
    tokens = ceil_div(shape.tokens, 64) * 64
    values = tokens * shape.heads * shape.width
    grouped = shape.heads != shape.key_heads
    return 4 * values * (3 if grouped else 1) + 4 * tokens * shape.heads


def flash_bytes(args: tuple[Any, ...]) -> int:
    """Bytes that torch's flash backward allocates inside: dq in fp32 and row sums, padded by a tile for each document,
    and with grouped heads dk and dv of every query head."""
    _, q, k, _, _, _, cu_seqlens = args[:7]
    tokens, heads, width = q.shape
    padded = tokens + 128 * (len(cu_seqlens) - 1)
    grouped = 2 * tokens * heads * width * q.element_size() if heads != k.shape[1] else 0
    return 4 * padded * heads * (width + 1) + grouped


def index_bytes(args: tuple[Any, ...]) -> int:
    """Bytes that torch allocates on CUDA to index by several tensors at once: each is expanded to the full shape."""
    indices = [index for index in args[1] if index is not None]
    many = math.prod(broadcast(index.shape for index in indices))
    return 8 * many * len(indices) if len({index.shape for index in indices}) > 1 else 0


TAKEN: dict[str, Callable[..., int]] = {"cudnn attention": workspace_bytes}


class OnGpu:
    """Allocates cuBLAS's workspace at the first product of a stream, and returns a tensor for what an operation
    allocates temporarily, to be held until it is done."""

    def __init__(self, tally: Tally):
        self.tally = tally
        self.spaces: dict[Any, torch.Tensor] = {}

    def before(self, func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
        if func is _FLASH_BACKWARD:
            return self._hold(flash_bytes(args))
        if func is aten.index.Tensor and (size := index_bytes(args)):
            return self._hold(size)
        if func.overloadpacket in GPU_PRODUCTS and self.tally.kind_of(args[0]) == "cuda":
            stream = graph.current_stream(META)
            if stream not in self.spaces:
                with self.tally.owner(WORKSPACES):
                    self.spaces[stream] = self._hold(CUBLAS)
        return None

    def _hold(self, size: int) -> torch.Tensor:
        return _entered(size, torch.uint8, "cuda", self.tally)


def copied_weight(tally: Tally, func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Some CPU libraries copy a transposed weight (x W') before they multiply; returns a tensor for that copy."""
    if func.overloadpacket not in PRODUCTS:
        return None
    a, b = [value for value in args if isinstance(value, torch.Tensor)][-2:]
    across = b.stride(0) == 1 and b.stride(-1) > 1
    if b.dim() != 2 or not across or len(a) < ENOUGH_ROWS:
        return None
    return _entered(b.numel(), b.dtype, "cpu", tally)


def _entered(count: int, dtype: torch.dtype, kind: str, tally: Tally) -> torch.Tensor:
    made = torch.empty(count, dtype=dtype, device=META)
    tally.see(made, kind)
    return made


@functools.cache
def copies_operand(dtype: torch.dtype) -> bool:
    """Whether this machine's library copies a transposed weight: measured, since it is not documented (oneDNN on Arm
    does in fp32)."""
    weight, x = torch.ones(4096, 1024, dtype=dtype), torch.ones(128, 1024, dtype=dtype)
    forget_peak()
    before = max(resident_bytes(), peak_resident_bytes())
    y = x @ weight.t()
    return peak_resident_bytes() - before - y.nbytes > weight.nbytes // 2
