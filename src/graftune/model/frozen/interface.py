"""Interfaces of frozen weights (`Frozen`, `Augmented`) and of the tensors they are made of (`RowSource`, `Packed`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from graftune.arithmetic import ceil_div
from graftune.kernels import augmented_weight, matmul
from graftune.kernels.augmented_weight import Adapters
from graftune.kernels.gguf_dequant.reference import PLAIN
from graftune.kernels.lora_linear import Copy
from graftune.model.bundles import MoveTensor

DTYPES = PLAIN  # by their names in safetensors and GGUF files
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def row_stride(width: int, adapter_columns: int) -> int:
    """The row stride of `width` values: `width` itself, or with adapter columns the next multiple of 64 values."""
    return ceil_div(width + adapter_columns, 64) * 64 if adapter_columns else width


ReadBlocks = Callable[[int, int], torch.Tensor]


class RowSource(Protocol):
    """Rows of a weight matrix, in a file or in memory. Read in fp32, or in their own float dtype if it is narrower."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype_name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def read(self, start: int, stop: int) -> torch.Tensor: ...
    def gather(self, ids: torch.Tensor) -> torch.Tensor: ...
    def values(self) -> torch.Tensor:
        """The whole tensor in its own shape: for vectors."""

    @property
    def raw(self) -> ReadBlocks | None:
        """A function that reads rows as GGUF blocks, [rows, bytes of a row] uint8, in the model's order; None: the rows
        are not stored as blocks."""


class Packed(RowSource, Protocol):
    """Rows of a weight matrix in memory, in a format that products cannot read. Values are computed in fp32 and rounded
    once, to the dtype asked for."""

    def unpack(self, out: torch.Tensor, start: int = 0, used: torch.Tensor | None = None) -> None:
        """Dequantises rows from `start` on into out [rows, in]; `out` may have a row stride. `used` [E + 1] (int32), if
        these are the weights of all E experts: where each expert's token rows begin; weights of experts without any may
        be skipped."""

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows `ids` [T] -> [T, in]."""

    def moved(self, place: MoveTensor) -> Packed:
        """A copy of this object with each tensor replaced by the result of `place` (model/bundles.py)."""

    def numbers(self) -> Iterator[torch.Tensor]:
        """Yields floats that are all finite if and only if all values are; for codes, their scales."""


class RowsByReading:
    """The parts of a RowSource that follow from `read` and `shape`."""

    shape: tuple[int, ...]

    def read(self, start: int, stop: int) -> torch.Tensor:
        raise NotImplementedError

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.values().index_select(0, ids.cpu())

    def values(self) -> torch.Tensor:
        return self.read(0, self.shape[0])

    @property
    def raw(self) -> ReadBlocks | None:
        return None


@dataclass(frozen=True)
class TensorRows(RowsByReading):
    """A tensor in memory as a RowSource."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.tensor.shape)

    @property
    def dtype_name(self) -> str:
        return NAMES[self.tensor.dtype]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tensor.index_select(0, ids.to(self.tensor.device))

    def values(self) -> torch.Tensor:
        return self.tensor


@dataclass(frozen=True, eq=False)
class CheckpointWeight(RowsByReading, ABC):
    """A quantised weight that a checkpoint stores in several tensors and that is read as a whole (a RowSource). The
    weight that was read last stays in memory, since its rows are read piece by piece."""

    name: str
    parts: Mapping[str, RowSource]
    shape: tuple[int, ...]
    dtype_name: str

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @abstractmethod
    def load(self, device: torch.device) -> Packed: ...

    @abstractmethod
    def empty(self, device: torch.device) -> Packed:
        """What `load` returns, but with uninitialised memory: for the memory plan."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        return _on_cpu(self).read(start, stop)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return _on_cpu(self).gather(ids.cpu())

    def values(self) -> torch.Tensor:
        return _on_cpu(self).values()


@lru_cache(maxsize=1)
def _on_cpu(weight: CheckpointWeight) -> Packed:
    return weight.load(torch.device("cpu"))


def loaded(source: RowSource) -> RowSource:
    """Returns the source; a CheckpointWeight is read once, as a whole, into host memory."""
    return source.load(torch.device("cpu")) if isinstance(source, CheckpointWeight) else source


class Frozen(Protocol):
    """A weight [out, in] as products read it. It never changes, except a `Trained` one."""

    kind: str
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int: ...
    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> x W' [T, out], a fresh tensor the caller may write to."""

    def input_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """grad [T, out] -> grad W [T, in]."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Embedding lookup: [T] -> [T, in]."""


class Augmented(ABC):
    """A frozen weight in a storage [out + adapter_columns, in + adapter_columns], so that one product multiplies weight
    and adapters (projection.py). With 0 adapter columns it is an ordinary one."""

    kind: str
    storage: torch.Tensor
    adapter_columns: int
    out_features: int
    in_features: int
    adapters: Adapters | None = None  # if they are written to the storage for each product

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
        """Buffers that it shares with other weights; `nbytes` does not count them."""
        return ()

    def dense(self, used: torch.Tensor | None = None) -> torch.Tensor:
        """The weight [out, in] as floats of the compute dtype, valid until the next product of the model. A packed
        weight is dequantised into `storage` by this call. `used`: see `Packed.unpack`."""
        return self.weight

    @property
    @abstractmethod
    def nbytes(self) -> int: ...
    def place_adapters(self, adapters: Adapters) -> list[Copy]:
        """Puts the adapters beside and below the weight. Returns the copies to make when they change. By default none:
        other weights use the same storage, so the adapters are written there for each product."""
        self.adapters = adapters
        return []

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return matmul.mm(x, self.dense().t())

    def input_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return matmul.mm(grad, self.dense())

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor: ...
    def matmul_augmented(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[x | h] [W | sB]', written to `out` [T, out] if given, which may have a row stride."""
        self.dense()
        if self.adapters is not None:
            augmented_weight.beside(self.beside, self.adapters)
        return matmul.mm(x, self.storage[: self.out_features].t(), out)

    def input_grad_augmented(self, grad: torch.Tensor) -> torch.Tensor:
        """[dY | g] [W ; A]."""
        self.dense()
        if self.adapters is not None:
            augmented_weight.below(self.below, self.adapters)
        return matmul.mm(grad, self.storage[:, : self.in_features])
