"""Matrix products a @ b. Inside `tuned()`, on CUDA in 16 or 8 bits, they use the algorithm that was timed fastest.

cuBLAS picks an algorithm by heuristics. A step's few products run thousands of times at fixed shapes, so it pays to
time what the library offers, once, at the first call of each shape. Elsewhere torch computes the product: on a CPU, in
fp32, in evaluation and generation with their many shapes, and in deterministic mode, where nothing may depend on
timing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from graftune import spans
from graftune.kernels import launch
from graftune.private import find

__all__ = ["mm", "scaled_mm", "tuned"]

_scaled_mm = find("torch._scaled_mm")
_tuning = False


@contextmanager
def tuned(on: bool = True) -> Iterator[None]:
    """Inside, products of new shapes are timed and the fastest algorithm is used."""
    global _tuning
    before, _tuning = _tuning, on
    try:
        yield
    finally:
        _tuning = before


@launch.operation(spans.PRODUCT)
def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a [M, K], b [K, N] -> [M, N], in `out` or a new tensor. Any row stride; a and b may be transposed."""
    if _tuning and launch.on_gpu(a) and a.dtype in (torch.bfloat16, torch.float16):
        from graftune.kernels.matmul import cublaslt

        return cublaslt.mm(a, b, out)
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)


@launch.operation(spans.PRODUCT)
def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Codes a [M, K], b [K, N] in e4m3, K contiguous in both, -> (a @ b) * scales[0] [M] * scales[1] [N], on CUDA. Uses
    the tensor cores' fast accumulation (at least 14 bits): its error is far below that of a code's 3 bits."""
    if _tuning:
        from graftune.kernels.matmul import cublaslt

        if cublaslt.multiplies_codes(a.device):
            return cublaslt.scaled_mm(a, b, scales, dtype)
    rows, columns = scales
    return _scaled_mm(
        a, b, scale_a=rows.unsqueeze(1), scale_b=columns.unsqueeze(0), out_dtype=dtype, use_fast_accum=True
    )
