"""Row sources that several ranks read together: each rank reads its share of the rows and gathers the others.

Every rank has to read the same tensors in the same order, as loading does. Every rank reads all of a vector: vectors
are small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from graftune.arithmetic import ceil_div
from graftune.model.bundles import Reading
from graftune.model.frozen import RowSource
from graftune.model.frozen.interface import CheckpointWeight
from graftune.weights.rows import Over


def divided(tensors: Mapping[str, RowSource], reading: Reading) -> dict[str, RowSource]:
    return {name: _divided(source, reading) for name, source in tensors.items()}


def _divided(source: RowSource, reading: Reading) -> RowSource:
    if isinstance(source, CheckpointWeight):  # read as a whole, part by part
        parts = {name: Divided(part, reading) for name, part in source.parts.items()}
        return dataclasses.replace(source, parts=cast(Any, parts))
    kind = DividedCodes if hasattr(source, "read_codes") else Divided
    return kind(source, reading) if len(source.shape) == 2 else source


@dataclass(frozen=True)
class Divided(Over):
    """Another source, of which each rank reads its share of the requested rows."""

    reading: Reading

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._together(self.source.read, start, min(stop, self.shape[0]))

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.source.gather(ids)

    def values(self) -> torch.Tensor:
        """Each rank reads all of a vector, and of a tensor with fewer rows than ranks."""
        if len(self.shape) < 2 or self.shape[0] < self.reading.size:
            return self.source.values()
        return self.read(0, self.shape[0])

    @property
    def raw(self) -> Callable[[int, int], torch.Tensor]:
        """A GGUF's blocks; raises AttributeError where the source has none."""
        read = cast(Any, self.source).raw
        return lambda start, stop: self._together(read, start, stop)

    def _together(self, read: Callable[[int, int], torch.Tensor], start: int, stop: int) -> torch.Tensor:
        first, last, share = self._share(start, stop)
        return self._gathered(read(first, last), share)[: stop - start]

    def _share(self, start: int, stop: int) -> tuple[int, int, int]:
        """(first row of this rank, end of its rows, rows of a share). Where rows do not divide evenly, the last ranks
        read rows that are dropped."""
        share = ceil_div(stop - start, self.reading.size)
        first = min(start + self.reading.rank * share, stop - 1)
        return first, min(first + share, stop), share

    def _gathered(self, own: torch.Tensor, share: int) -> torch.Tensor:
        if len(own) < share:
            own = torch.cat((own, own.new_zeros(share - len(own), *own.shape[1:])))
        return self.reading.gather(own)


class DividedCodes(Divided):
    """The same for FP8 codes with a scale a row (CodedRows of model/frozen/fp8.py)."""

    def read_codes(self, start: int, stop: int) -> Any:
        first, last, share = self._share(start, stop)
        own = cast(Any, self.source).read_codes(first, last)
        parts = own.codes.view(torch.uint8), own.scale
        return type(own)(*(self._gathered(part, share)[: stop - start] for part in parts))
