"""Row sources made of other sources, and the cases in which a file stores other values than the engine uses.

Order: a file may hold the rows or columns of a tensor in another order (`PartSpec.order_in`): GGUFs of Llama interleave
the halves of each head, those of Qwen3.5 have other places for value heads. An adapter's B has the rows of its weight,
and its A the columns. Values: Gemma's folders store norms less one; GGUFs store a delta net's decay as -exp of ours,
and leave out dimensions of one.

Files are of two kinds, "folder" (Hugging Face's) and "gguf". `from_file` and `to_file` convert a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from graftune.model.frozen.interface import ReadBlocks, RowsByReading, RowSource
from graftune.model.part import FileOrder
from graftune.model.spec import ModelSpec


def order_in(file: str, spec: ModelSpec, name: str) -> FileOrder | None:
    """The order of a tensor or of an adapter's A or B, given by our name, in a file of this kind; None: ours."""
    part, inner = spec.part_of(name)
    if part is None:
        return None
    return part.adapter_order_in(file, inner) if ".lora_" in name else part.order_in(file, inner.partition(".")[0])


def adapter_to_file(value: torch.Tensor, file: str, spec: ModelSpec, name: str) -> torch.Tensor:
    """One of an adapter's tensors in the order of a file of this kind."""
    return _sorted(value, order_in(file, spec, name))


def adapter_from_file(value: torch.Tensor, file: str, spec: ModelSpec, name: str) -> torch.Tensor:
    """The reverse of `adapter_to_file`."""
    order = order_in(file, spec, name)
    return _sorted(value, None if order is None else order.inverse())


def _sorted(value: torch.Tensor, order: FileOrder | None) -> torch.Tensor:
    if order is None or value.dim() <= order.dim or value.shape[order.dim] != len(order.indices):
        return value  # a tensor of another size is refused later, by its shape
    return value.index_select(order.dim, order.indices.to(value.device))


@dataclass(frozen=True)
class DerivedRows(RowsByReading):
    """A row source made of another one. `nbytes` is the other's, in proportion to the number of values."""

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
class RowRange(DerivedRows):
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
    def raw(self) -> ReadBlocks | None:
        return None if self.source.raw is None else partial(self._range, self.source.raw)

    def _range(self, read: Callable[[int, int], torch.Tensor], start: int, stop: int) -> torch.Tensor:
        return read(self.first + start, self.first + min(stop, self.count))


@dataclass(frozen=True)
class CombinedRows(RowsByReading):
    """A row source made of several others of one type."""

    parts: tuple[RowSource, ...]

    @property
    def dtype_name(self) -> str:
        return self.parts[0].dtype_name

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Joined(CombinedRows):
    """The rows of several sources, one after the other."""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def read(self, start: int, stop: int) -> torch.Tensor:
        found, first = [], 0
        for part in self.parts:
            begin, end = max(start - first, 0), min(stop - first, part.shape[0])
            if begin < end:
                found.append(part.read(begin, end))
            first += part.shape[0]
        return torch.cat(found)


def gguf_rows(spec: ModelSpec, name: str, rows: int, parts: int) -> tuple[int, ...]:
    """How many rows of a tensor, given by our name, each of the `parts` tensors has that hold it in a GGUF."""
    part, inner = spec.part_of(name)
    found = part.gguf_rows.get(inner.partition(".")[0]) if part is not None and parts > 1 else None
    return found or (rows // parts,) * parts


def divided(source: RowSource, sizes: tuple[int, ...]) -> list[RowSource]:
    """Splits a source into several with these numbers of rows."""
    if len(sizes) == 1:
        return [source]
    if isinstance(source, Joined) and tuple(part.shape[0] for part in source.parts) == sizes:
        return list(source.parts)
    return [RowRange(source, size, sum(sizes[:place])) for place, size in enumerate(sizes)]


@dataclass(frozen=True)
class Reordered(DerivedRows):
    """Another source with its rows, or columns, in another order."""

    order: FileOrder

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.of(self.source.read, start, stop)

    def values(self) -> torch.Tensor:
        return _sorted(self.source.values(), self.order)

    @property
    def raw(self) -> ReadBlocks | None:
        """None for reordered columns: those inside a block cannot change places."""
        return None if self.source.raw is None or self.order.dim else partial(self.of, self.source.raw)

    def of(self, read: Callable[[int, int], torch.Tensor], start: int, stop: int) -> torch.Tensor:
        """Reorders the rows that `read` returns (the source's values or blocks, or changes to them). Most rows move
        within a few heads, so only the rows between the first and the last one needed are read."""
        if self.order.dim:
            return _sorted(read(start, stop), self.order)
        ids = self.order.indices[start:stop]
        first, last = int(ids.min()), int(ids.max())
        return read(first, last + 1).index_select(0, ids - first)  # indexing takes 5 to 13 times as long for bytes


@dataclass(frozen=True)
class Converted(DerivedRows):
    """A small tensor that a file stores in another form: with other values, or (`to`) in another shape."""

    convert: Callable[[torch.Tensor], torch.Tensor]
    to: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.to or self.source.shape

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.values()[start:stop]

    def values(self) -> torch.Tensor:
        return self.convert(self.source.values())


def _added(source: RowSource, number: float) -> Converted:
    """Gemma's checkpoints store norm weights less one; here, and in GGUF, the weight is the factor that the normed
    value is multiplied by."""
    return Converted(source, lambda values: values.float() + number)


def _reshaped(source: RowSource, shape: tuple[int, ...]) -> Converted:
    """GGUF leaves out the middle dimension of a depthwise convolution's taps."""
    return Converted(source, lambda values: values.reshape(shape), shape)


def shapes_of(spec: ModelSpec, name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(shape here, shape in a GGUF) of a tensor that a part has beside its projections. A GGUF leaves out dimensions of
    one (a depthwise convolution's taps are [D, 1, K] in Hugging Face's folders). None if the shapes are the same."""
    part, inner = spec.part_of(name)
    shape = part.tensors.get(inner, ()) if part is not None else ()
    return (shape, tuple(size for size in shape if size != 1)) if 1 in shape else None


def from_file(source: RowSource, file: str, spec: ModelSpec, name: str) -> RowSource:
    """A tensor as the engine uses it, out of a file of this kind. Wrong shapes are refused later (`open_base`)."""
    shapes, (part, inner) = shapes_of(spec, name), spec.part_of(name)
    if file == "gguf" and shapes is not None and source.shape == shapes[1]:
        source = _reshaped(source, shapes[0])
    # A damaged file may claim heads whose order would not fit into memory.
    fits = part is not None and part.weights.get(part.named(inner)) == tuple(source.shape)
    order = order_in(file, spec, name) if fits else None
    if file == "gguf" and part is not None and inner in part.log_decays:
        source = Converted(source, lambda values: (-values.float()).log())
    if order is not None:
        source = Reordered(source, order.inverse())
    shift = spec.norm_offset(name) if file == "folder" else 0.0
    return _added(source, shift) if shift else source


def to_file(source: RowSource, file: str, spec: ModelSpec, name: str) -> RowSource:
    """The reverse of `from_file`. An unchanged tensor from a file of this kind has the file's values, to the bit."""
    order, shapes, (part, inner) = order_in(file, spec, name), shapes_of(spec, name), spec.part_of(name)
    shift = spec.norm_offset(name) if file == "folder" else 0.0
    if shift:
        source = source.source if isinstance(source, Converted) else _added(source, -shift)
    if order is not None:
        source = Reordered(source, order)
    if file == "gguf" and part is not None and inner in part.log_decays:
        source = source.source if isinstance(source, Converted) else Converted(source, lambda v: -v.float().exp())
    if file == "gguf" and shapes is not None:
        source = _reshaped(source, shapes[1])
    return source
