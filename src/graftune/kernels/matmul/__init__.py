"""Matrix products a @ b. Inside `tuned()`, on CUDA in 16 or 8 bits, by the algorithm that was fastest when timed.

cuBLAS picks an algorithm by a rule of thumb; the step's few products run thousands of times at fixed shapes, so it pays
to time what the library offers, once, at the first call of each shape. Elsewhere (CPU, fp32, evaluation and generation
with their many shapes, deterministic mode, where no choice may hang on a clock) it is torch's own product.
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
    global _tuning
    before, _tuning = _tuning, on
    try:
        yield
    finally:
        _tuning = before


@launch.operation(spans.PRODUCT)
def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a [M, K], b [K, N] -> [M, N], fresh or `out`; rows (or, of a and b transposed, columns) may lie apart."""
    if _tuning and launch.on_gpu(a) and a.dtype in (torch.bfloat16, torch.float16):
        from graftune.kernels.matmul import cublaslt

        return cublaslt.mm(a, b, out)
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)


@launch.operation(spans.PRODUCT)
def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Codes a [M, K], b [K, N] in e4m3, K contiguous in both, -> (a @ b) * scales[0] [M] * scales[1] [N], on CUDA. By
    the units' own sums (14 bits and more of each step): what they lose is far below what 3 bits of a code lose."""
    if _tunes_codes(a.device):
        from graftune.kernels.matmul import cublaslt

        return cublaslt.scaled_mm(a, b, scales, dtype)
    rows, columns = scales
    return _scaled_mm(
        a, b, scale_a=rows.unsqueeze(1), scale_b=columns.unsqueeze(0), out_dtype=dtype, use_fast_accum=True
    )


def _tunes_codes(device: torch.device) -> bool:
    if not _tuning:
        return False
    from graftune.kernels.matmul import cublaslt

    return cublaslt.multiplies_codes(device)
