"""Matrix products a @ b. Inside `tuned()`, on CUDA in 16 bits, by the algorithm that was fastest when it was timed.

cuBLAS picks an algorithm by a rule of thumb; the step's few products run thousands of times at fixed shapes, so it pays
to time what the library offers, once, at the first call of each shape. Elsewhere (CPU, fp32, evaluation and generation
with their many shapes, deterministic mode, where no choice may hang on a clock) it is torch's own product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["mm", "tuned"]

_tuning = False


@contextmanager
def tuned(on: bool = True) -> Iterator[None]:
    global _tuning
    before, _tuning = _tuning, on
    try:
        yield
    finally:
        _tuning = before


def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a [M, K], b [K, N] -> [M, N], fresh or `out`; rows (or, of a and b transposed, columns) may lie apart."""
    if _tuning and a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        from graftune.kernels.matmul import cublaslt

        return cublaslt.mm(a, b, out)
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
