"""Writes tensors to disk a few rows at a time: a few megabytes of a model exist at once, whatever its size.

A row source is read piece by piece; each piece is encoded in the type that the file stores and appended. Blocks that
have this type already are copied. Then the file is read back, and every byte is compared by its checksum.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from graftune.errors import GraftuneError
from graftune.kernels.gguf_dequant import KINDS, dequantise
from graftune.kernels.gguf_dequant.reference import PLAIN
from graftune.model.frozen import ReadBlocks, RowSource, pieces
from graftune.weights import safetensors_io
from graftune.weights.gguf_quant import quantise
from graftune.weights.safetensors_io import CarriedTensor


@dataclass(frozen=True)
class OutputTensor:
    """A tensor that is to be written to a file."""

    name: str
    source: RowSource | CarriedTensor
    kind: str  # F32, BF16, Q8_0, ...; a carried tensor keeps its own, whatever it is

    @property
    def nbytes(self) -> int:
        if isinstance(self.source, CarriedTensor) or self.blocks is not None:
            return self.source.nbytes
        block = KINDS[self.kind]
        return math.prod(self.source.shape) // block.values * block.bytes

    @property
    def blocks(self) -> ReadBlocks | None:
        """Reads the source's blocks, which are copied if they have this type and no adapter has changed them."""
        source = self.source
        if isinstance(source, CarriedTensor) or self.kind in PLAIN or source.dtype_name != self.kind:
            return None
        return source.raw


# Called with a tensor, the first and last row of a piece, and a function that returns its first n rows as stored.
OnPiece = Callable[[OutputTensor, int, int, Callable[[int], torch.Tensor]], None]
# Called with the tensor that is written and the bytes written since the last call; None: the file is read back.
OnBytes = Callable[[OutputTensor | None, int], None]


@dataclass(frozen=True)
class Watcher:
    """The callbacks of an export."""

    on_piece: OnPiece = lambda tensor, start, stop, stored: None
    on_bytes: OnBytes = lambda tensor, nbytes: None


UNWATCHED = Watcher()


def _ranges(source: RowSource) -> list[tuple[int, int]]:
    """The rows that are written at a time; a vector is written whole."""
    rows, *inner = source.shape
    return pieces(rows, math.prod(inner)) if inner else [(0, rows)]


def raw(values: torch.Tensor) -> memoryview:
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_tensor(file: BinaryIO, tensor: OutputTensor, watcher: Watcher = UNWATCHED) -> int:
    """Appends the tensor to the file and returns its checksum."""
    check = 0
    watcher.on_bytes(tensor, 0)
    for piece in _encoded(tensor, watcher):
        file.write(piece)
        check = zlib.crc32(piece, check)
        watcher.on_bytes(tensor, piece.nbytes)
    return check


def _encoded(tensor: OutputTensor, watcher: Watcher) -> Iterator[memoryview]:
    """The bytes of a tensor as the file stores them, piece by piece."""
    source, blocks_of = tensor.source, tensor.blocks
    if isinstance(source, CarriedTensor):
        yield from source.pieces()
    elif blocks_of is not None:
        for start, stop in _ranges(source):
            yield raw(blocks_of(start, stop))
    else:
        for start, stop in _ranges(source):
            values = (source.read(start, stop) if len(source.shape) > 1 else source.values()).float().cpu()
            try:
                blocks = quantise(values.reshape(-1, values.shape[-1]), tensor.kind)
            except GraftuneError as error:
                raise GraftuneError(f"{tensor.name}: {error.what}", fix=error.fix) from None
            watcher.on_piece(tensor, start, stop, partial(_first_rows, blocks, tensor.kind, tuple(values.shape)))
            yield raw(blocks)


def _first_rows(blocks: torch.Tensor, kind: str, shape: tuple[int, ...], rows: int) -> torch.Tensor:
    """The first rows of a piece of this shape, as a reader of the file sees them."""
    blocks = blocks[: rows * math.prod(shape[1:-1])]
    out = torch.empty(len(blocks), shape[-1])
    dequantise(blocks, kind, out)
    return out.view(-1, *shape[1:])


def carried_outputs(tensors: Mapping[str, CarriedTensor]) -> list[OutputTensor]:
    """Carried tensors to write unchanged, for an export in the base's own format."""
    return [OutputTensor(name, tensor, tensor.dtype_name) for name, tensor in tensors.items()]


def check_tensor(tensor: OutputTensor, back: RowSource, stored: Iterable[Any], checksum: int, where: Path) -> None:
    """Compares a tensor with what our reader found: shape, type and bytes. `stored`: the bytes read back."""
    if tuple(back.shape) != tuple(tensor.source.shape) or back.dtype_name != tensor.kind:
        raise misread(f"{tensor.name} in another shape or type", where)
    check = 0
    for piece in stored:
        check = zlib.crc32(piece, check)
    if check != checksum:
        raise misread(f"{tensor.name} with other bytes", where)


def misread(what: str, where: Path) -> GraftuneError:
    return GraftuneError(f"reading back what was written gives {what}", where=str(where), fix="check the disk")


def write_safetensors(path: Path, tensors: Sequence[OutputTensor], watcher: Watcher = UNWATCHED) -> dict[str, int]:
    """Writes the length of the JSON header, the header and the tensors. Returns each tensor's checksum."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.kind,
            "shape": list(tensor.source.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        return {tensor.name: write_tensor(file, tensor, watcher) for tensor in tensors}


def check_safetensors(found: Any, tensors: Sequence[OutputTensor], sums: dict[str, int], where: Path) -> None:
    """`found`: the tensors that our reader finds in the files."""
    if set(found) != {tensor.name for tensor in tensors}:
        raise misread("other tensors than were written", where)
    carried = {t.name for t in tensors if isinstance(t.source, CarriedTensor)}
    as_bytes = safetensors_io.carried({name: found[name] for name in carried})
    for tensor in tensors:
        back = found[tensor.name]
        stored = as_bytes[tensor.name].pieces() if tensor.name in carried else _stored(back)
        check_tensor(tensor, back, stored, sums[tensor.name], where)


def _stored(tensor: RowSource) -> Iterator[memoryview]:
    """The bytes of a safetensors tensor, piece by piece."""
    for start, stop in _ranges(tensor):
        yield raw(tensor.read(start, stop))
