"""Row sources made of other sources, and the two cases in which a file stores other values than the engine uses.

Q and K: Hugging Face stores a head as two halves, and rope rotates a value of one half with one of the other. The llama
architecture of GGUF, and a few others, interleave the halves, so that rope rotates neighbours. An adapter's B has the
same row order as the weight. Norms: Gemma's checkpoints store them less one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from graftune.model.frozen.interface import BlockSource, RowsByReading, RowSource
from graftune.model.spec import ModelSpec


def heads_of(spec: ModelSpec, name: str) -> tuple[int, int] | None:
    """How many heads the rows of a tensor are divided into and how wide each is, if rope turns them."""
    part, inner = spec.part_of(name)
    return None if part is None else part.rotated.get(inner.partition(".")[0])


def gguf_order(heads: int, head_width: int) -> torch.Tensor:
    """Row i of the GGUF is row order[i] of Hugging Face's."""
    order = torch.arange(heads * head_width).view(heads, 2, head_width // 2)
    return order.transpose(1, 2).reshape(-1)


def hf_order(heads: int, head_width: int) -> torch.Tensor:
    """The other way round."""
    return gguf_order(heads, head_width).argsort()


@dataclass(frozen=True)
class Over(RowsByReading):
    """A row source made of another one. Its bytes are its share of the other's values."""

    source: RowSource

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.source.shape

    @property
    def dtype_name(self) -> str:
        return self.source.dtype_name

    @property
    def nbytes(self) -> int:
        return self.source.nbytes * math.prod(self.shape) // max(1, math.prod(self.source.shape))


@dataclass(frozen=True)
class RowRange(Over):
    """`count` rows of another source, from row `first` on."""

    count: int
    first: int = 0

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.count, *self.source.shape[1:])

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._range(self.source.read, start, stop)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.source.gather(ids + self.first)

    @property
    def raw(self) -> Callable[[int, int], torch.Tensor]:
        """A GGUF's blocks; raises AttributeError where the source has none."""
        return partial(self._range, cast(BlockSource, self.source).raw)

    def _range(self, read: Callable[[int, int], torch.Tensor], start: int, stop: int) -> torch.Tensor:
        return read(self.first + start, self.first + min(stop, self.count))


def divided(source: RowSource, parts: int) -> list[RowSource]:
    """The rows of a source as so many sources of equal size."""
    size = source.shape[0] // parts
    return [source] if parts == 1 else [RowRange(source, size, part * size) for part in range(parts)]


@dataclass(frozen=True)
class Reordered(Over):
    """Another source with its rows in another order."""

    order: torch.Tensor

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._reordered(self.source.read, start, stop)

    @property
    def raw(self) -> Callable[[int, int], torch.Tensor]:
        """A GGUF's blocks; raises AttributeError where the source has none."""
        return partial(self._reordered, cast(BlockSource, self.source).raw)

    def _reordered(self, read: Callable[[int, int], torch.Tensor], start: int, stop: int) -> torch.Tensor:
        """Rows change places within a head, so the rows of a few heads are read, not the whole weight."""
        ids = self.order[start:stop]
        first, last = int(ids.min()), int(ids.max())
        return read(first, last + 1)[ids - first]


@dataclass(frozen=True)
class AddedVector(Over):
    """A vector with a number added. Gemma's checkpoints store norm weights less one; here, and in GGUF, the weight is
    the factor that the normed value is multiplied by."""

    by: float

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.values()[start:stop]

    def values(self) -> torch.Tensor:
        return self.source.values().float() + self.by


@dataclass(frozen=True)
class Reshaped(Over):
    """Rows in another shape. GGUF leaves out the middle dimension of a depthwise convolution's taps."""

    to: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.to

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.source.read(start, stop).reshape(-1, *self.to[1:])

    def values(self) -> torch.Tensor:
        return self.source.values().reshape(self.to)


def shapes_of(spec: ModelSpec, name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Of a tensor that a part has beside its projections: its shape here, and in a GGUF, which leaves out dimensions of
    one (a depthwise convolution's taps are [D, 1, K] in Hugging Face's folders). None where they are the same."""
    part, inner = spec.part_of(name)
    shape = part.tensors.get(inner, ()) if part is not None else ()
    return (shape, tuple(size for size in shape if size != 1)) if 1 in shape else None


def shifted_norms(tensors: Mapping[str, RowSource], spec: ModelSpec, sign: int) -> dict[str, RowSource]:
    """Tensors by our names, from a checkpoint of Hugging Face (`sign` 1) to the values that the engine computes with,
    or back (-1)."""
    shifts = {name: sign * spec.norm_offset(name) for name in tensors}
    return {name: AddedVector(t, shifts[name]) if shifts[name] else t for name, t in tensors.items()}
