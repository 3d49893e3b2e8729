"""What the trainer asks of a weight, and what weights are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from graftune.arithmetic import ceil_div
from graftune.kernels.augmented_weight import Adapters
from graftune.kernels.lora_linear import Copy
from graftune.model.bundles import Place


def row_stride(width: int, adapter_columns: int) -> int:
    """The row stride of `width` values: `width` itself, or with adapter columns the next multiple of 64 values."""
    return ceil_div(width + adapter_columns, 64) * 64 if adapter_columns else width


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


class BlockSource(Protocol):
    """Rows of GGUF blocks in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype_name(self) -> str: ...
    def raw(self, start: int, stop: int) -> torch.Tensor:
        """[rows, bytes of a row] uint8, in the model's order."""
        ...


class Packed(RowSource, Protocol):
    """Rows of a weight matrix in memory, in another form than the products want."""

    def unpack(self, out: torch.Tensor, start: int = 0) -> None:
        """Rows from `start` on into out [rows, in], rounded to its dtype; the rows of `out` may lie apart."""
        ...

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows `ids` [T] -> [T, in]."""
        ...

    def moved(self, place: Place) -> Packed:
        """The same with its tensors elsewhere (model/bundles.py)."""
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


class Augmented(ABC):
    """A frozen weight in a storage [out + adapter_columns, in + adapter_columns], so that one product serves weight and
    adapters (projection.py). With 0 adapter columns it is an ordinary one."""

    kind: str
    storage: torch.Tensor
    adapter_columns: int
    out_features: int
    in_features: int

    @property
    def weight(self) -> torch.Tensor:
        return self.storage[: self.out_features, : self.in_features]

    @property
    def beside(self) -> torch.Tensor:
        """[out, adapter_columns], for s B."""
        return self.storage[: self.out_features, self.in_features :]

    @property
    def below(self) -> torch.Tensor:
        """[adapter_columns, in], for A."""
        return self.storage[self.out_features :, : self.in_features]

    @property
    def shared(self) -> tuple[torch.Tensor, ...]:
        """What it works in and has in common with the others: not in its bytes."""
        return ()

    @property
    @abstractmethod
    def nbytes(self) -> int: ...
    @abstractmethod
    def place_adapters(self, adapters: Adapters) -> list[Copy]:
        """Let the adapters live beside and below the weight. Returns what is to be copied there when they change."""

    @abstractmethod
    def matmul(self, x: torch.Tensor) -> torch.Tensor: ...
    @abstractmethod
    def input_grad(self, grad: torch.Tensor) -> torch.Tensor: ...
    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor: ...
    @abstractmethod
    def matmul_augmented(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[x | h] [W | sB]', written to `out` [T, out] if given, whose rows may lie apart."""

    @abstractmethod
    def input_grad_augmented(self, grad: torch.Tensor) -> torch.Tensor:
        """[dY | g] [W ; A]."""
