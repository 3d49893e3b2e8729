"""Writes tensors to disk a few rows at a time: a few megabytes of a model exist at once, whatever its size.

A row source is read piece by piece; each piece is encoded in the type that the file stores and appended. Then the file
is read back: every byte by its checksum, and some rows by their values, since a checksum of wrong bytes would match.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from graftune.errors import GraftuneError
from graftune.kernels.gguf_dequant import KINDS, dequantise
from graftune.model.frozen import RowSource
from graftune.model.frozen.tensor_rows import DTYPES
from graftune.weights.gguf_quant import quantise

PIECE_BYTES = 8 << 20  # fp32 bytes of a weight that exist at once
SAMPLED_ROWS = 16
SMALL = 1 << 16  # values of a matrix that is read at once rather than row by row
# Error of the rows read back, as a share of their own norm: above it something is wrong, not only coarse.
_COARSE = {
    **{"Q8_0": 0.02, "Q6_K": 0.06, "Q5_0": 0.1, "Q5_1": 0.1, "Q5_K": 0.1, "Q4_0": 0.2, "Q4_1": 0.2, "Q4_K": 0.2},
    **{"IQ4_NL": 0.2, "IQ4_XS": 0.2, "Q3_K": 0.35},
}


@dataclass(frozen=True)
class OutputTensor:
    """A tensor that is to be written to a file."""

    name: str
    source: RowSource
    kind: str  # F32, BF16, Q8_0, ...

    @property
    def nbytes(self) -> int:
        block = KINDS[self.kind]
        return math.prod(self.source.shape) // block.values * block.bytes


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


def pieces(source: RowSource) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(start, stop, rows in fp32 on the CPU); a vector is one piece."""
    if len(source.shape) == 1:
        yield 0, source.shape[0], source.values().float().cpu()
        return
    size = max(1, PIECE_BYTES // (4 * math.prod(source.shape[1:])))
    for start in range(0, source.shape[0], size):
        stop = min(start + size, source.shape[0])
        yield start, stop, source.read(start, stop).float().cpu()


def raw(values: torch.Tensor) -> memoryview:
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_tensor(file: BinaryIO, tensor: OutputTensor, watcher: Watcher = UNWATCHED) -> int:
    """Appends the tensor to the file and returns its checksum."""
    check = 0
    watcher.on_bytes(tensor, 0)
    for start, stop, values in pieces(tensor.source):
        try:
            blocks = quantise(values.reshape(-1, values.shape[-1]), tensor.kind)
        except GraftuneError as error:
            raise GraftuneError(f"{tensor.name}: {error.what}", fix=error.fix) from None
        watcher.on_piece(tensor, start, stop, partial(_first_rows, blocks, tensor.kind, tuple(values.shape)))
        file.write(raw(blocks))
        check = zlib.crc32(raw(blocks), check)
        watcher.on_bytes(tensor, blocks.nbytes)
    return check


def _first_rows(blocks: torch.Tensor, kind: str, shape: tuple[int, ...], rows: int) -> torch.Tensor:
    """The first rows of a piece of this shape, as a reader of the file sees them."""
    blocks = blocks[: rows * math.prod(shape[1:-1])]
    out = torch.empty(len(blocks), shape[-1])
    dequantise(blocks, kind, out)
    return out.view(-1, *shape[1:])


def check_tensor(tensor: OutputTensor, back: RowSource, stored: Iterable[Any], checksum: int, where: Path) -> None:
    """Compares a tensor with what our reader found: shape, type, bytes and some rows. `stored`: its bytes."""
    if tuple(back.shape) != tuple(tensor.source.shape) or back.dtype_name != tensor.kind:
        raise misread(f"{tensor.name} in another shape or type", where)
    check = 0
    for piece in stored:
        check = zlib.crc32(piece, check)
    if check != checksum:
        raise misread(f"{tensor.name} with other bytes", where)
    if len(back.shape) == 1:
        got, want = back.values().float(), tensor.source.values().float().cpu()
    else:
        count = back.shape[0]
        ids = torch.linspace(0, count - 1, min(SAMPLED_ROWS, count)).round().long().unique()
        each = math.prod(back.shape[1:-1])  # rows of the file: readers count those of all matrices of a stack
        got = torch.cat([back.read(each * i, each * (i + 1)).float() for i in ids.tolist()])
        want = _picked(tensor.source, ids).view_as(got)
    if tensor.kind in DTYPES:
        tolerance = max(torch.finfo(DTYPES[tensor.kind]).eps, 1e-5)  # sums over fewer rows may round the other way
        same = bool(((got - want).abs() <= tolerance * want.abs() + 1e-6 * want.abs().max()).all())
    else:
        same = bool((got - want).norm() <= _COARSE[tensor.kind] * want.norm() + 1e-6)
    if not same:
        raise misread(f"{tensor.name} with other values", where)


def _picked(source: RowSource, ids: torch.Tensor) -> torch.Tensor:
    """A few rows of a matrix, one by one unless it is small: a lookup in a safetensors file would read all of it."""
    if math.prod(source.shape) <= SMALL:
        return source.read(0, source.shape[0]).float().cpu()[ids]
    return torch.cat([source.read(row, row + 1).float().cpu() for row in ids.tolist()])


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
    for tensor in tensors:
        check_tensor(tensor, found[tensor.name], _stored(found[tensor.name]), sums[tensor.name], where)


def _stored(tensor: RowSource) -> Iterator[memoryview]:
    """The bytes of a safetensors tensor, piece by piece."""
    size = max(1, PIECE_BYTES // (4 * math.prod(tensor.shape[1:])))
    for start in range(0, tensor.shape[0], size):
        yield raw(tensor.read(start, min(start + size, tensor.shape[0])))
