"""The formats a weight may have in memory. Values are computed in fp32 and rounded once, to the compute dtype.

On a GPU a product unpacks them into the scratch; on a CPU they are sources of rows (mapped.py), as those of a file are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from graftune.kernels import gguf_dequant, nf4
from graftune.kernels.nf4 import Nf4
from graftune.model.bundles import Place
from graftune.model.frozen.interface import BlockSource, RowSource
from graftune.model.frozen.mapped import fill, pieces, read_to


@dataclass(frozen=True)
class Nf4Rows:
    """NF4 in bitsandbytes' layout."""

    nf4: Nf4
    dtype_name: str = "nf4"

    @staticmethod
    def quantised(source: RowSource, device: torch.device) -> Nf4Rows:
        """Streamed: beside the result a few rows exist at a time, in the file's dtype, quantised on the device."""
        rows, width = source.shape
        dtype = source.read(0, 1).dtype
        parts = (read_to(source, start, stop, device) for start, stop in pieces(rows, width))
        return Nf4Rows(nf4.quantise_pieces(parts, source.shape, dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.nf4.shape

    @property
    def nbytes(self) -> int:
        return self.nf4.nbytes

    def unpack(self, out: torch.Tensor, start: int = 0) -> None:
        nf4.dequantise(self.nf4, out=out, rows=(start, start + len(out)))

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return nf4.gather(self.nf4, ids, dtype)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return nf4.dequantise(self.nf4, torch.float32, rows=(start, stop))

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return nf4.gather(self.nf4, ids, torch.float32)

    def values(self) -> torch.Tensor:
        return nf4.dequantise(self.nf4, torch.float32)

    def moved(self, place: Place) -> Nf4Rows:
        elsewhere: dict[str, Any] = {
            name: place(x) for name, x in vars(self.nf4).items() if isinstance(x, torch.Tensor)
        }
        return replace(self, nf4=replace(self.nf4, **elsewhere))


@dataclass(frozen=True)
class GgufRows:
    """GGUF blocks, byte for byte the file's."""

    blocks: torch.Tensor  # [rows, bytes of a row] uint8
    dtype_name: str
    width: int

    @staticmethod
    def uploaded(source: BlockSource, count: int, device: torch.device) -> GgufRows:
        """The source's first `count` rows, from the map straight to the device."""
        width = source.shape[1]
        size = gguf_dequant.row_bytes(source.dtype_name, width)
        blocks = torch.empty(count, size, dtype=torch.uint8, device=device)
        for start, stop in pieces(count, width):
            blocks[start:stop].copy_(source.raw(start, stop))
        return GgufRows(blocks, source.dtype_name, width)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.blocks), self.width

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def unpack(self, out: torch.Tensor, start: int = 0) -> None:
        gguf_dequant.dequantise(self.blocks[start : start + len(out)], self.dtype_name, out)

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return gguf_dequant.gather(self.blocks, self.dtype_name, ids, dtype)

    def read(self, start: int, stop: int) -> torch.Tensor:
        out = torch.empty(stop - start, self.width, dtype=torch.float32, device=self.blocks.device)
        self.unpack(out, start)
        return out

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lookup(ids, torch.float32)

    def values(self) -> torch.Tensor:
        return self.read(0, len(self.blocks))

    def moved(self, place: Place) -> GgufRows:
        return replace(self, blocks=place(self.blocks))


@dataclass(frozen=True)
class FloatRows:
    """Floats of another dtype than the products': cast into the scratch."""

    tensor: torch.Tensor

    @staticmethod
    def loaded(source: RowSource, dtype: torch.dtype, device: torch.device) -> FloatRows:
        tensor = torch.empty(source.shape, dtype=dtype, device=device)
        fill(tensor, source)
        return FloatRows(tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype_name(self) -> str:
        return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[self.tensor.dtype]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def unpack(self, out: torch.Tensor, start: int = 0) -> None:
        gguf_dequant.cast(self.tensor[start : start + len(out)], out)

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.tensor.index_select(0, ids).to(dtype)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tensor.index_select(0, ids)

    def values(self) -> torch.Tensor:
        return self.tensor

    def moved(self, place: Place) -> FloatRows:
        return replace(self, tensor=place(self.tensor))
