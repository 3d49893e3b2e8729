"""The frozen weight: one matmul interface, whatever the weight is made of.

The trainer never asks which kind it holds: that is a property of the weight, not a mode of the trainer. `Dense` keeps
the values resident in the compute dtype; `Mapped` leaves them in the file and dequantises the rows of one product at a
time, so that host memory stays flat. Both are made of RowSources, so q, k and v (or gate and up) are one weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

MAPPED_ROWS_BYTES = 8 << 20  # fp32 bytes of a mapped weight that exist at once


class RowSource(Protocol):
    """Rows of a weight matrix, wherever they lie. Read in fp32 (or in their own float dtype where that is narrower)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype_name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def read(self, start: int, stop: int) -> torch.Tensor: ...
    def gather(self, ids: torch.Tensor) -> torch.Tensor: ...
    def values(self) -> torch.Tensor:
        """All of it, in its own shape: for vectors."""
        ...


class Frozen(Protocol):
    """A weight [out, in] that never changes."""

    kind: str
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int: ...
    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> x W' [T, out], a fresh tensor the caller may write to."""
        ...

    def input_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """grad [T, out] -> grad W [T, in]."""
        ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Embedding lookup: [T] -> [T, in]."""
        ...


class Dense:
    """Resident, as a rule in the compute dtype."""

    def __init__(self, weight: torch.Tensor, compute: torch.dtype):
        self.weight, self.compute = weight, compute
        self.out_features, self.in_features = weight.shape
        self.kind = {torch.bfloat16: "bf16", torch.float32: "fp32"}[weight.dtype]

    @staticmethod
    def of(sources: Sequence[RowSource], device: torch.device, dtype: torch.dtype, compute: torch.dtype) -> Dense:
        """Filled straight from the sources, a few rows at a time: the peak is the weight and one piece."""
        rows, width = sum(s.shape[0] for s in sources), sources[0].shape[1]
        weight = torch.empty(rows, width, dtype=dtype, device=device)
        at = 0
        for source in sources:
            for start, stop in _pieces(source.shape[0], width):
                weight[at + start : at + stop].copy_(source.read(start, stop))
            at += source.shape[0]
        return Dense(weight, compute)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self._as(x.dtype).t()

    def input_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return grad @ self._as(grad.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, ids).to(self.compute)

    def _as(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in the product's dtype: itself, or (bf16 weights on a device without bf16 units) a cast copy."""
        return self.weight if self.weight.dtype == dtype else self.weight.to(dtype)


class Mapped:
    """As the file has it. Every product dequantises the rows it needs into a small buffer and lets them go."""

    def __init__(self, sources: Sequence[RowSource], device: torch.device, dtype: torch.dtype):
        self.sources, self.device, self.dtype = list(sources), device, dtype
        self.out_features, self.in_features = sum(s.shape[0] for s in sources), sources[0].shape[1]
        self.kind = "+".join(dict.fromkeys(s.dtype_name for s in sources))

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.sources)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        for columns, weight in self._parts():
            torch.mm(x, weight.t(), out=out[:, columns])
        return out

    def input_grad(self, grad: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(grad), self.in_features, dtype=torch.float32, device=grad.device)
        for columns, weight in self._parts():
            if grad.dtype == torch.float32:
                out.addmm_(grad[:, columns], weight)
            else:
                out.add_(grad[:, columns] @ weight)
        return out.to(grad.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        assert len(self.sources) == 1, "lookups are made in a single table"
        return self.sources[0].gather(ids).to(self.device, self.dtype)

    def _parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """(output columns, their rows of the weight in the compute dtype); one piece is alive at a time."""
        at = 0
        for source in self.sources:
            for start, stop in _pieces(source.shape[0], self.in_features):
                yield slice(at + start, at + stop), source.read(start, stop).to(self.device, self.dtype)
            at += source.shape[0]


def _pieces(rows: int, width: int) -> list[tuple[int, int]]:
    size = max(1, MAPPED_ROWS_BYTES // (4 * width))
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]
