"""A GGUF file out: header values, tensor table, then blocks, a few rows at a time.

The keys of a GGUF base are copied as bytes, so that a key nobody here knows keeps its type: the gguf package's writer
wants Python values, and guesses the width of a number from them. New keys are encoded here. What was written is read
back with our own reader: every block by its checksum, some rows by their values.
"""

from __future__ import annotations

import math
import mmap
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.model.frozen import RowSource
from graftune.weights.gguf_io import MAGIC, _Cursor, read_gguf
from graftune.weights.gguf_quant import quantise
from graftune.weights.streamed import DTYPES, OnPiece, nothing, pick, pieces, raw, sampled_rows, spoilt, within_rounding

ALIGNMENT = 32
_FORMS = {
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
}
# Error of the rows read back, as a share of their own norm: above it something is wrong, not only coarse.
_COARSE = {
    **{"Q8_0": 0.02, "Q6_K": 0.06, "Q5_0": 0.1, "Q5_1": 0.1, "Q5_K": 0.1, "Q4_0": 0.2, "Q4_1": 0.2, "Q4_K": 0.2},
    **{"IQ4_NL": 0.2, "IQ4_XS": 0.2, "Q3_K": 0.35},
}


def text(value: str) -> bytes:
    return struct.pack("<I", GGUFValueType.STRING) + _text(value)


def number(value: int | float | bool, kind: GGUFValueType = GGUFValueType.UINT32) -> bytes:
    if isinstance(value, bool):
        kind = GGUFValueType.BOOL
    elif isinstance(value, float):
        kind = GGUFValueType.FLOAT32
    return struct.pack("<I", kind) + struct.pack(_FORMS[kind], value)


def array(values: Sequence[Any], kind: GGUFValueType) -> bytes:
    head = struct.pack("<IIQ", GGUFValueType.ARRAY, kind, len(values))
    if kind == GGUFValueType.STRING:
        return head + b"".join(map(_text, values))
    return head + struct.pack(f"<{len(values)}{_FORMS[kind][1]}", *values)


def _text(value: str) -> bytes:
    encoded = value.encode("utf-8", errors="surrogateescape")
    return struct.pack("<Q", len(encoded)) + encoded


def header_of(path: Path) -> dict[str, bytes]:
    """The keys of a file that `read_gguf` took, each with its type and value as they lie there."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, path)
        cursor.take(8)
        cursor.count(24)
        found = {}
        for _ in range(cursor.count(13)):
            key, start = cursor.text(), cursor.at
            cursor.value(cursor.value_type())
            found[key] = data[start : cursor.at]
        return found


@dataclass(frozen=True)
class Block:
    """A tensor of a GGUF file to be."""

    name: str
    source: RowSource
    kind: str  # F32, Q8_0, ...

    @property
    def nbytes(self) -> int:
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        return math.prod(self.source.shape) // values * size


def padded(size: int) -> int:
    return ceil_div(size, ALIGNMENT) * ALIGNMENT


# What is being worked on, and how many of its bytes were written since the last call. None: what was written is read.
OnBytes = Callable[[Block | None, int], None]


def unseen(tensor: Block | None, nbytes: int) -> None:
    """For who does not want to see how far the file is."""


def write_gguf(
    path: Path,
    keys: Mapping[str, bytes],
    tensors: Sequence[Block],
    on_piece: OnPiece = nothing,
    on_bytes: OnBytes = unseen,
) -> None:
    """Write and read back, to a place that `files.new_file` gave."""
    with path.open("wb") as file:
        sums = _write(file, keys, tensors, on_piece, on_bytes)
    on_bytes(None, 0)
    _check(path, keys, tensors, sums)


def _write(
    file: BinaryIO,
    keys: Mapping[str, bytes],
    tensors: Sequence[Block],
    on_piece: OnPiece,
    on_bytes: OnBytes,
) -> list[int]:
    file.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(keys)))
    for key, value in keys.items():
        file.write(_text(key) + value)
    at = 0
    for tensor in tensors:
        shape = tensor.source.shape
        file.write(_text(tensor.name) + struct.pack("<I", len(shape)))
        file.write(struct.pack(f"<{len(shape)}Q", *reversed(shape)))
        file.write(struct.pack("<IQ", GGMLQuantizationType[tensor.kind], at))
        at += padded(tensor.nbytes)
    file.write(bytes(padded(file.tell()) - file.tell()))
    sums = []
    for tensor in tensors:
        check = size = 0
        on_bytes(tensor, 0)
        for start, stop, values in pieces(tensor.source):
            blocks = _blocks(values, tensor)
            on_piece(tensor.source, start, stop, partial(_read, blocks, tensor, tuple(values.shape)))
            file.write(raw(blocks))
            check, size = zlib.crc32(raw(blocks), check), size + blocks.nbytes
            on_bytes(tensor, blocks.nbytes)
        file.write(bytes(padded(size) - size))
        sums.append(check)
    return sums


def _blocks(values: torch.Tensor, tensor: Block) -> torch.Tensor:
    try:
        return quantise(values.reshape(-1, values.shape[-1]), tensor.kind)
    except GraftuneError as error:
        raise GraftuneError(f"{tensor.name}: {error.what}", fix=error.fix) from None


def _read(blocks: torch.Tensor, tensor: Block, shape: tuple[int, ...], rows: int) -> torch.Tensor:
    """The first rows of a piece of this shape, as whoever reads the file sees them."""
    from graftune.kernels.gguf_dequant import dequantise

    blocks = blocks[: rows * math.prod(shape[1:-1])]
    if tensor.kind in DTYPES:
        return blocks.view(DTYPES[tensor.kind]).float().view(-1, *shape[1:])
    out = torch.empty(len(blocks), shape[-1])
    dequantise(blocks, tensor.kind, out)
    return out.view(-1, *shape[1:])


def _check(path: Path, keys: Mapping[str, bytes], tensors: Sequence[Block], sums: Sequence[int]) -> None:
    found = read_gguf(path)
    if header_of(path) != dict(keys):
        raise spoilt("other keys than were written", path)
    if list(found.tensors) != [tensor.name for tensor in tensors]:
        raise spoilt("other tensors than were written", path)
    for tensor, check in zip(tensors, sums, strict=True):
        back = found.tensors[tensor.name]
        if back.shape != tuple(tensor.source.shape) or back.kind.name != tensor.kind:
            raise spoilt(f"{tensor.name} in another shape or type", path)
        if zlib.crc32(back.blocks.reshape(-1).data) != check:
            raise spoilt(f"{tensor.name} with other bytes", path)
        if len(back.shape) == 1:
            got, want = back.values(), tensor.source.values().float().cpu()
        else:
            ids = sampled_rows(tensor.source)
            each = math.prod(back.shape[1:-1])  # of a stack, our reader counts the rows of all its matrices
            got = torch.cat([back.read(each * i, each * (i + 1)) for i in ids.tolist()])
            want = pick(tensor.source, ids).view_as(got)
        if tensor.kind in DTYPES:
            same = within_rounding(got, want, DTYPES[tensor.kind])
        else:
            same = bool((got - want).norm() <= _COARSE[tensor.kind] * want.norm() + 1e-6)
        if not same:
            raise spoilt(f"{tensor.name} with other values", path)
