"""GGUF blocks, byte for byte as in the file: a GPU dequantises them for each product. MXFP4 is a format of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from graftune.kernels import gguf_dequant
from graftune.kernels.gguf_dequant.reference import PLAIN
from graftune.model.bundles import MoveTensor
from graftune.model.frozen.interface import RowsByReading, RowSource
from graftune.model.frozen.mapped import pieces
from graftune.model.frozen.weight_format import WeightFormat


@dataclass(frozen=True)
class GgufRows(RowsByReading):
    blocks: torch.Tensor  # [rows, bytes of a row] uint8
    dtype_name: str
    width: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return len(self.blocks), self.width

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def unpack(self, out: torch.Tensor, start: int = 0, used: torch.Tensor | None = None) -> None:
        gguf_dequant.dequantise(self.blocks[start : start + len(out)], self.dtype_name, out, used=used)

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return gguf_dequant.gather(self.blocks, self.dtype_name, ids, dtype)

    def read(self, start: int, stop: int) -> torch.Tensor:
        out = torch.empty(stop - start, self.width, dtype=torch.float32, device=self.blocks.device)
        self.unpack(out, start)
        return out

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lookup(ids, torch.float32)

    def moved(self, place: MoveTensor) -> GgufRows:
        return replace(self, blocks=place(self.blocks))

    def numbers(self) -> Iterator[torch.Tensor]:
        yield gguf_dequant.scales(self.blocks, self.dtype_name)


class GgufFormat(WeightFormat):
    """All block types of GGUF except its floats and MXFP4. The setting `keep` leaves them unchanged; no setting selects
    them by name."""

    name = "gguf"
    by_name = False

    def claims(self, source: RowSource) -> bool:
        return source.raw is not None and source.dtype_name not in (*PLAIN, "MXFP4")

    def has_kernel(self, source: RowSource) -> bool:
        return source.dtype_name in gguf_dequant.KINDS

    def pack(self, source: RowSource, device: torch.device) -> GgufRows:
        return self.pack_all([source], device)[0]

    def pack_all(self, sources: Sequence[RowSource], device: torch.device) -> list[GgufRows]:
        """Copies the sources straight from the mapped file to the device. Neighbouring sources of one kind become one
        member, which one launch dequantises: experts are many."""
        found: list[GgufRows] = []
        for kind, group in groupby(sources, lambda source: source.dtype_name):
            members = list(group)
            rows, width = sum(source.shape[0] for source in members), members[0].shape[1]
            blocks = torch.empty(rows, gguf_dequant.row_bytes(kind, width), dtype=torch.uint8, device=device)
            rest = blocks
            for source in members:
                assert source.raw is not None, "the format claims sources of blocks only"
                for start, stop in pieces(source.shape[0], width):
                    rest[start:stop].copy_(source.raw(start, stop))
                rest = rest[source.shape[0] :]
            found.append(GgufRows(blocks, kind, width))
        return found


FORMATS = (GgufFormat(),)
