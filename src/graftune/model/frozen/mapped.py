"""Products with a weight that is dequantised a few rows at a time, and functions that read rows in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from graftune import spans
from graftune.kernels import gguf_dequant, launch, rehearsal
from graftune.kernels.lora_linear import add_product_
from graftune.model.bundles import MoveTensor
from graftune.model.frozen.interface import Packed, ReadBlocks, RowSource

MAPPED_ROWS_BYTES = 8 << 20  # fp32 bytes of a mapped weight that exist at once


class ByPieces(ABC):
    """Products with a weight that is given in pieces; input gradients are summed over the pieces in fp32."""

    out_features: int
    in_features: int

    @abstractmethod
    def parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """(output columns, their rows of the weight in the compute dtype); one piece is alive at a time."""

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        for columns, weight in self.parts():
            torch.mm(x, weight.t(), out=out[:, columns])
        return out

    def input_grad(self, grad: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(grad), self.in_features, dtype=torch.float32, device=grad.device)
        for columns, weight in self.parts():
            add_product_(out, grad[:, columns], weight)
        return out.to(grad.dtype)


class Mapped(ByPieces):
    """A weight on a CPU, in the file or in memory: every product dequantises it a few rows at a time."""

    def __init__(self, sources: Sequence[RowSource], device: torch.device, dtype: torch.dtype):
        self.members, self.device, self.dtype = list(sources), device, dtype
        self.out_features, self.in_features = sum(s.shape[0] for s in sources), sources[0].shape[1]
        self.kind = "+".join(dict.fromkeys(s.dtype_name for s in sources))

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.members)

    def move(self, place: MoveTensor) -> None:
        """Requires that all members are in memory."""
        self.members = [cast(Packed, source).moved(place) for source in self.members]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        assert len(self.members) == 1, "lookups are made in a single table"
        return self.members[0].gather(ids).to(self.device, self.dtype)

    def parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        spans.operation(spans.PRODUCT)
        at = 0
        for source in self.members:
            for start, stop in pieces(source.shape[0], self.in_features):
                yield slice(at + start, at + stop), source.read(start, stop).to(self.device, self.dtype)
            at += source.shape[0]


def few_read(sources: Sequence[RowSource]) -> Iterator[tuple[RowSource, bool]]:
    """Yields each member of a weight and whether to read it. A rehearsal reads only a few of many."""
    read = {id(source) for source in rehearsal.few(list(sources))}
    for source in sources:
        yield source, id(source) in read


def fill(target: torch.Tensor, source: RowSource) -> None:
    """Copy a source into a matrix of its shape, a few rows at a time."""
    device = launch.device_of(target)
    blocks = _blocks_for(source, device)
    for start, stop in pieces(*source.shape):
        if blocks is None:
            target[start:stop].copy_(source.read(start, stop))
        else:
            gguf_dequant.dequantise(blocks(start, stop).to(device), source.dtype_name, target[start:stop])


def read_to(source: RowSource, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Rows of a source on a device, with the values of `read`."""
    blocks = _blocks_for(source, device)
    if blocks is None:
        return source.read(start, stop).to(device)
    out = torch.empty(stop - start, source.shape[1], dtype=torch.float32, device=device)
    gguf_dequant.dequantise(blocks(start, stop).to(device), source.dtype_name, out)
    return out


def _blocks_for(source: RowSource, device: torch.device) -> ReadBlocks | None:
    """The function that reads a source's GGUF blocks, if they are dequantised on a GPU, to the same bits; else None.
    The CPU would need every core for it, and two runs that start at the same time would wait for each other."""
    return source.raw if launch.on_gpu(device) and gguf_dequant.is_quantised(source.dtype_name) else None


def numbers(source: RowSource) -> Iterator[torch.Tensor]:
    """Yields floats that are all finite if and only if the source's values are; a file is read a few rows at a time."""
    if hasattr(source, "numbers"):
        yield from source.numbers()
    elif len(source.shape) != 2:
        yield source.values()
    else:
        blocks = source.raw if gguf_dequant.is_quantised(source.dtype_name) else None
        for start, stop in pieces(*source.shape):
            if blocks is None:
                yield source.read(start, stop)
            else:
                yield gguf_dequant.scales(blocks(start, stop), source.dtype_name)


def pieces(rows: int, width: int) -> list[tuple[int, int]]:
    """Ranges of rows that take MAPPED_ROWS_BYTES in fp32."""
    size = max(1, MAPPED_ROWS_BYTES // (4 * width))
    return rehearsal.few_runs([(start, min(start + size, rows)) for start in range(0, rows, size)])
