"""The APR v2 container: a header, flat JSON metadata, an index of tensors and their bytes, under two checksums.

    0   magic "APR\\0", version 2 0, flags u16, tensor count u32, metadata offset u64 and size u32,
        index offset u64, data offset u64, CRC32 of the header without itself u32, 20 zero bytes
    64  metadata | index | data, each zero-padded to 64 bytes, as is every tensor
    end CRC32 u32 of everything before

Everything is little-endian. The checksums find every changed byte; a file that is wrong under right checksums is
refused where its numbers reach beyond the file or contradict each other. Writing what `read` returned gives the same
bytes.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.io.files import new_file
from graftune.weights.opening import open_map

MAGIC, VERSION = b"APR\0", (2, 0)
ROW_MAJOR = 1024
_REFUSED = {1: "LZ4", 2: "Zstandard", 4: "encryption", 8: "a signature", 16: "shards", 2048: "column-major tensors"}
_HEADER = struct.Struct("<4sBBHIQIQQI20s")
ALIGN = 64
MOST_METADATA, MOST_NAME, MOST_DIMS = 16 << 20, 256, 8
# The format also numbers quantised types (12 and 14), which adapters do not have.
DTYPES = {
    0: torch.float32,
    1: torch.float16,
    3: torch.float64,
    4: torch.int32,
    5: torch.int64,
    6: torch.int8,
    7: torch.uint8,
    30: torch.bfloat16,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class AprFile:
    metadata: dict[str, Any]
    tensors: Mapping[str, torch.Tensor]


def write(path: Path, file: AprFile) -> None:
    """Writes aside, reads back, flushes, and renames over the target."""
    with new_file(path) as aside:
        with aside.open("wb") as out:
            checksum = 0
            for piece in _pieces(file):
                out.write(piece)
                checksum = zlib.crc32(piece, checksum)
            out.write(struct.pack("<I", checksum))
        read(aside)  # compares the checksums with what is on the disk


def _pieces(file: AprFile) -> list[bytes | memoryview]:
    """The file in order, without its last four bytes."""
    metadata = json.dumps(file.metadata, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    tensors = sorted(((name.encode(), tensor) for name, tensor in file.tensors.items()), key=lambda each: each[0])
    index, at = b"", 0
    data: list[bytes | memoryview] = []
    for name, tensor in tensors:
        size, dims = tensor.nbytes, len(tensor.shape)
        index += struct.pack("<H", len(name)) + name + struct.pack("<BB", _CODES[tensor.dtype], dims)
        index += struct.pack(f"<{dims}QQQ", *tensor.shape, at, size)
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        data += [flat.numpy().data, bytes(-size % ALIGN)]
        at += _padded(size)
    index_at = ALIGN + _padded(len(metadata))
    fields = (MAGIC, *VERSION, ROW_MAJOR, len(tensors), ALIGN, len(metadata), index_at, index_at + _padded(len(index)))
    header = _HEADER.pack(*fields, 0, bytes(20))
    header = _HEADER.pack(*fields, _header_checksum(header), bytes(20))
    return [header, metadata, bytes(-len(metadata) % ALIGN), index, bytes(-len(index) % ALIGN), *data]


def _padded(size: int) -> int:
    return ceil_div(size, ALIGN) * ALIGN


def _header_checksum(header: bytes) -> int:
    return zlib.crc32(header[44:64], zlib.crc32(header[:40]))


def read(path: Path) -> AprFile:
    """Reads a file and checks it to the last byte."""
    data = open_map(path, mmap.ACCESS_COPY)
    if data[:4] != MAGIC:
        raise GraftuneError("is not an APR file", where=str(path), fix="give one that was exported as apr")
    try:
        return _parsed(data)
    except (ValueError, OverflowError, RecursionError, struct.error) as error:
        fix = "the file is damaged or of another version: copy or export it again"
        raise GraftuneError(f"cannot be read ({error})", where=str(path), fix=fix) from None


def _parsed(data: mmap.mmap) -> AprFile:
    """Raises a ValueError that says what is wrong with the file."""
    header, end = data[:ALIGN], len(data) - 4
    _, major, minor, flags, count, metadata_at, size, index_at, data_at, checksum, _ = _HEADER.unpack(header)
    if checksum != _header_checksum(header):
        raise ValueError("its header does not match its checksum")
    if (major, minor) != VERSION:
        raise ValueError(f"it is APR version {major}.{minor}")
    if used := [what for flag, what in _REFUSED.items() if flags & flag]:
        raise ValueError(f"it uses {used[0]}")
    with memoryview(data)[:end] as view:
        if zlib.crc32(view) != struct.unpack_from("<I", data, end)[0]:
            raise ValueError("it does not match its checksum")
    if size > MOST_METADATA:
        raise ValueError(f"its metadata is {size} bytes")
    metadata = json.loads(data[metadata_at : metadata_at + size].decode())
    if not isinstance(metadata, dict):
        raise ValueError("its metadata is not a JSON object")
    return AprFile(metadata, _tensors(data, count, index_at, data_at))


def _tensors(data: mmap.mmap, count: int, at: int, data_at: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    before = b""
    for _ in range(count):
        (length,) = struct.unpack_from("<H", data, at)
        name, (code, dims) = data[at + 2 : at + 2 + length], data[at + 2 + length : at + 4 + length]
        if not before < name or length > MOST_NAME or dims > MOST_DIMS:
            raise ValueError("its index is not in order")
        *shape, offset, size = struct.unpack_from(f"<{dims}QQQ", data, at + 4 + length)
        at, before = at + 4 + length + 8 * dims + 16, name
        dtype = DTYPES.get(code)
        if dtype is None or size != math.prod(shape) * dtype.itemsize or data_at + offset + size > len(data) - 4:
            raise ValueError(f"a tensor {shape} of type {code} cannot be {size} bytes at {offset}")
        values = torch.from_numpy(np.frombuffer(data, np.uint8, size, data_at + offset))
        found[name.decode()] = values.clone().view(dtype).view(shape)
    return found
