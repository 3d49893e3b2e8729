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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.io.files import new_file
from graftune.kernels import gguf_dequant
from graftune.weights.opening import open_map

MAGIC, VERSION = b"APR\0", (2, 0)
QUANTISED, ROW_MAJOR = 32, 1024
_REFUSED = {1: "LZ4", 2: "Zstandard", 4: "encryption", 8: "a signature", 16: "shards", 2048: "column-major tensors"}
_HEADER = struct.Struct("<4sBBHIQIQQI20s")
ALIGN = 64
MOST_METADATA, MOST_NAME, MOST_DIMS = 16 << 20, 256, 8
CODES = {
    **{"F32": 0, "F16": 1, "F64": 3, "I32": 4, "I64": 5, "I8": 6, "U8": 7},
    **{"Q4_K": 12, "Q6_K": 14, "BF16": 30},
}
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "F64": torch.float64,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
}
_BY_CODE = {code: name for name, code in CODES.items()}
_BY_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class AprTensor:
    kind: str
    shape: tuple[int, ...]
    data: torch.Tensor = field(repr=False)  # [bytes] uint8

    @classmethod
    def of(cls, values: torch.Tensor) -> AprTensor:
        flat = values.detach().cpu().contiguous().view(-1)
        return cls(_BY_DTYPE[values.dtype], tuple(values.shape), flat.view(torch.uint8))

    def values(self) -> torch.Tensor:
        """As numbers, quantised ones in fp32."""
        if self.kind in DTYPES:
            return self.data.clone().view(DTYPES[self.kind]).view(self.shape)
        out = torch.empty(math.prod(self.shape[:-1]), self.shape[-1])
        gguf_dequant.dequantise(self.data.view(len(out), -1), self.kind, out)
        return out.view(self.shape)


@dataclass(frozen=True)
class AprFile:
    metadata: dict[str, Any]
    tensors: Mapping[str, AprTensor]
    flags: int = ROW_MAJOR


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
    tensors = sorted((name.encode(), tensor) for name, tensor in file.tensors.items())
    index, at = b"", 0
    data: list[bytes | memoryview] = []
    for name, tensor in tensors:
        size, dims = tensor.data.numel(), len(tensor.shape)
        index += struct.pack("<H", len(name)) + name + struct.pack("<BB", CODES[tensor.kind], dims)
        index += struct.pack(f"<{dims}QQQ", *tensor.shape, at, size)
        data += [tensor.data.numpy().data, bytes(-size % ALIGN)]
        at += _padded(size)
    index_at = ALIGN + _padded(len(metadata))
    fields = (MAGIC, *VERSION, file.flags, len(tensors), ALIGN, len(metadata), index_at, index_at + _padded(len(index)))
    header = _HEADER.pack(*fields, 0, bytes(20))
    header = _HEADER.pack(*fields, _header_checksum(header), bytes(20))
    return [header, metadata, bytes(-len(metadata) % ALIGN), index, bytes(-len(index) % ALIGN), *data]


def _padded(size: int) -> int:
    return ceil_div(size, ALIGN) * ALIGN


def _header_checksum(header: bytes) -> int:
    return zlib.crc32(header[44:64], zlib.crc32(header[:40]))


def read(path: Path) -> AprFile:
    """Checked to the last byte; the tensors are views of the file's map."""
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
    return AprFile(metadata, _tensors(data, count, index_at, data_at), flags)


def _tensors(data: mmap.mmap, count: int, at: int, data_at: int) -> dict[str, AprTensor]:
    found: dict[str, AprTensor] = {}
    before = b""
    for _ in range(count):
        (length,) = struct.unpack_from("<H", data, at)
        name, (code, dims) = data[at + 2 : at + 2 + length], data[at + 2 + length : at + 4 + length]
        if not before < name or length > MOST_NAME or dims > MOST_DIMS:
            raise ValueError("its index is not in order")
        *shape, offset, size = struct.unpack_from(f"<{dims}QQQ", data, at + 4 + length)
        at, before = at + 4 + length + 8 * dims + 16, name
        kind = _BY_CODE.get(code, "")
        if not kind or size != _nbytes(kind, shape) or data_at + offset + size > len(data) - 4:
            raise ValueError(f"a tensor {shape} of type {code} cannot be {size} bytes at {offset}")
        values = torch.from_numpy(np.frombuffer(data, np.uint8, size, data_at + offset))
        found[name.decode()] = AprTensor(kind, tuple(shape), values)
    return found


def _nbytes(kind: str, shape: list[int]) -> int:
    if kind in DTYPES:
        return math.prod(shape) * DTYPES[kind].itemsize
    block = gguf_dequant.KINDS[kind]
    return math.prod(shape[:-1]) * (shape[-1] // block.values) * block.bytes if shape else 0
