"""The frozen weight: one matmul interface, whatever the weight is made of.

The trainer never asks which kind it holds: that is a property of the weight, not a mode of the trainer. `Dense` keeps
the values resident in the compute dtype, with room for adapters beside them where asked (projection.py says why);
`Mapped` leaves them in the file and dequantises the rows of one product at a time, so that host memory stays flat;
`Trained` is not frozen at all but a view into the arena, for full-parameter training. Dense and Mapped are made of
RowSources, so q, k and v (or gate and up) are one weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from graftune.kernels import matmul
from graftune.kernels.lora_linear import add_product_

MAPPED_ROWS_BYTES = 8 << 20  # fp32 bytes of a mapped weight that exist at once


def apart(width: int, room: int) -> int:
    """How far apart rows of `width` values lie: as they are, or with room beside them in whole lines of 64 values."""
    return -(-(width + room) // 64) * 64 if room else width


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
    """Resident, as a rule in the compute dtype; `room` columns and rows lie beside and below, zero at first."""

    def __init__(self, weight: torch.Tensor, compute: torch.dtype, room: int = 0):
        self.storage, self.compute, self.room = weight, compute, room
        self.out_features, self.in_features = (n - room for n in weight.shape)
        self.weight = weight[: self.out_features, : self.in_features]
        self.kind = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[weight.dtype]

    @staticmethod
    def empty(
        rows: int, width: int, device: torch.device, dtype: torch.dtype, compute: torch.dtype, room: int
    ) -> Dense:
        storage = torch.empty(rows + room, apart(width, room), dtype=dtype, device=device)[:, : width + room]
        storage[rows:].zero_()
        storage[:, width:].zero_()
        return Dense(storage, compute, room)

    @staticmethod
    def of(
        sources: Sequence[RowSource], device: torch.device, dtype: torch.dtype, compute: torch.dtype, room: int = 0
    ) -> Dense:
        """Filled straight from the sources, a few rows at a time: the peak is the weight and one piece."""
        rows, width = sum(s.shape[0] for s in sources), sources[0].shape[1]
        dense = Dense.empty(rows, width, device, dtype, compute, room)
        at = 0
        for source in sources:
            fill(dense.weight[at : at + source.shape[0]], source)
            at += source.shape[0]
        return dense

    @property
    def nbytes(self) -> int:
        return self.storage.untyped_storage().nbytes()

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return matmul.mm(x, self._as(x.dtype).t())

    def input_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return matmul.mm(grad, self._as(grad.dtype))

    def matmul_with_room(self, x: torch.Tensor) -> torch.Tensor:
        """[x | h] [W | sB]'."""
        return matmul.mm(x, self.storage[: self.out_features].t())

    def input_grad_with_room(self, grad: torch.Tensor) -> torch.Tensor:
        """[dY | g] [W ; A]."""
        return matmul.mm(grad, self.storage[:, : self.in_features])

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, ids).to(self.compute)

    def _as(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in the product's dtype: itself, or (bf16 weights on a device without bf16 units) a cast copy."""
        return self.weight if self.weight.dtype == dtype else self.weight.to(dtype)


class Trained:
    """A weight that trains: its copy in the compute dtype and its fp32 gradient are views into the arena."""

    kind = "trained"

    def __init__(self, weight: torch.Tensor, grad: torch.Tensor):
        self.weight, self.grad = weight, grad
        self.out_features, self.in_features = weight.shape

    @property
    def nbytes(self) -> int:
        return 0  # the arena counts it

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return matmul.mm(x, self.weight.t())

    def input_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return matmul.mm(grad, self.weight)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, ids)

    def learn(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """Adds dW = dY' x in fp32."""
        add_product_(self.grad, grad.t(), x)

    def learn_rows(self, ids: torch.Tensor, grad: torch.Tensor) -> None:
        """Adds the gradient of a lookup."""
        self.grad.index_add_(0, ids, grad.float())


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


def fill(target: torch.Tensor, source: RowSource) -> None:
    """Copy a source into a matrix of its shape, a few rows at a time."""
    for start, stop in _pieces(*source.shape):
        target[start:stop].copy_(source.read(start, stop))


def _pieces(rows: int, width: int) -> list[tuple[int, int]]:
    size = max(1, MAPPED_ROWS_BYTES // (4 * width))
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]
