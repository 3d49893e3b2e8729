"""The APR v2 container: a header, flat JSON metadata, an index of tensors and their bytes, under two checksums.

    0   magic "APR\\0", version 2 0, flags u16, tensor count u32, metadata offset u64 and size u32,
        index offset u64, data offset u64, CRC32 of the header without itself u32, 20 zero bytes
    64  metadata | index | data, each zero-padded to 64 bytes, as is every tensor
    end CRC32 u32 of everything before

Everything is little-endian. The start of each section follows from the one before it. So the reader computes every
offset and compares, instead of following offsets that a damaged file may claim, and every changed byte is noticed.
Writing what `read` returned gives the same bytes.
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
from typing import Any, NamedTuple

import torch

from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.io.files import new_file
from graftune.kernels import gguf_dequant
from graftune.weights.opening import open_map

MAGIC, VERSION = b"APR\0", (2, 0)
QUANTISED, ROW_MAJOR = 32, 1024
_REFUSED = {1: "LZ4", 2: "Zstandard", 4: "encryption", 8: "a signature", 16: "shards", 2048: "column-major tensors"}
_KNOWN_FLAGS = 0xFFF
_HEADER = struct.Struct("<4sBBHIQIQQI20s")
ALIGN, LEAST_ENTRY = 64, 21
MOST_METADATA, MOST_NAME, MOST_DIMS = 16 << 20, 256, 8


class Kind(NamedTuple):
    code: int
    dtype: torch.dtype | None  # None: blocks
    values: int  # of a block, or 1
    bytes: int


KINDS = {
    "F32": Kind(0, torch.float32, 1, 4),
    "F16": Kind(1, torch.float16, 1, 2),
    "F64": Kind(3, torch.float64, 1, 8),
    "I32": Kind(4, torch.int32, 1, 4),
    "I64": Kind(5, torch.int64, 1, 8),
    "I8": Kind(6, torch.int8, 1, 1),
    "U8": Kind(7, torch.uint8, 1, 1),
    "Q4_K": Kind(12, None, 256, 144),
    "Q6_K": Kind(14, None, 256, 210),
    "BF16": Kind(30, torch.bfloat16, 1, 2),
}
_BY_CODE = {kind.code: name for name, kind in KINDS.items()}
_BY_DTYPE = {kind.dtype: name for name, kind in KINDS.items() if kind.dtype is not None}


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
        kind = KINDS[self.kind]
        if kind.dtype is not None:
            return self.data.clone().view(kind.dtype).view(self.shape)
        out = torch.empty(math.prod(self.shape[:-1]), self.shape[-1])
        gguf_dequant.dequantise(self.data.view(len(out), -1), self.kind, out)
        return out.view(self.shape)


@dataclass(frozen=True)
class AprFile:
    metadata: dict[str, Any]
    tensors: Mapping[str, AprTensor]
    flags: int = ROW_MAJOR


def write(path: Path, file: AprFile) -> None:
    """Writes aside, reads back and compares, flushes, and renames over the target."""
    with new_file(path) as aside:
        with aside.open("wb") as out:
            checksum = 0
            for piece in _pieces(file, path):
                out.write(piece)
                checksum = zlib.crc32(piece, checksum)
            out.write(struct.pack("<I", checksum))
        again = read(aside)
        same = again.metadata == file.metadata and list(again.tensors) == sorted(file.tensors, key=str.encode)
        if not same or any(not torch.equal(again.tensors[n].data, tensor.data) for n, tensor in file.tensors.items()):
            raise GraftuneError("reading back what was written gives other values", where=str(path))
        del again  # it holds a map of the file


def _pieces(file: AprFile, path: Path) -> list[bytes | memoryview]:
    """The file in order, without its last four bytes."""
    metadata = json.dumps(file.metadata, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    tensors = sorted((name.encode(), tensor) for name, tensor in file.tensors.items())
    index, at = b"", 0
    data: list[bytes | memoryview] = []
    for name, tensor in tensors:
        if not 0 < len(name) <= MOST_NAME or len(tensor.shape) > MOST_DIMS:
            raise GraftuneError(f"tensor {name.decode()!r} has too long a name", where=str(path), fix="rename it")
        size, dims = tensor.data.numel(), len(tensor.shape)
        index += struct.pack("<H", len(name)) + name + struct.pack("<BB", KINDS[tensor.kind].code, dims)
        index += struct.pack(f"<{dims}QQQ", *tensor.shape, at, size)
        data += [tensor.data.numpy().data, bytes(-size % ALIGN)]
        at += _padded(size)
    if len(metadata) > MOST_METADATA:
        raise GraftuneError(f"its metadata is longer than {MOST_METADATA} bytes", where=str(path), fix="shorten it")
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
    return _Reader(open_map(path, mmap.ACCESS_COPY), path).file()


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.size = data, path, len(data)

    def damaged(self, what: str) -> GraftuneError:
        return GraftuneError(what, where=str(self.path), fix="the file is damaged: copy or export it again")

    def file(self) -> AprFile:
        if self.data[:4] != MAGIC:
            raise GraftuneError("is not an APR file", where=str(self.path), fix="give one that was exported as apr")
        if self.size < _HEADER.size + 4:
            raise self.damaged(f"ends after {self.size} bytes")
        fields = _HEADER.unpack(self.data[: _HEADER.size])
        _, major, minor, flags, count, metadata_at, metadata_size, index_at, data_at, checksum, zeros = fields
        if checksum != _header_checksum(self.data[: _HEADER.size]):
            raise self.damaged("its header does not match its checksum")
        if (major, minor) != VERSION:
            raise GraftuneError(f"is APR version {major}.{minor}", where=str(self.path), fix="export it as 2.0")
        self._check_flags(flags)
        if metadata_at != ALIGN or metadata_size > MOST_METADATA or any(zeros):
            raise self.damaged("its header makes no sense")
        if index_at != ALIGN + _padded(metadata_size) or not index_at <= data_at <= self.size - 4:
            raise self.damaged("its sections do not follow each other within the file")
        self._check_sum()
        tensors, end = self._tensors(count, index_at, data_at)
        if end != self.size - 4:
            raise self.damaged(f"its tensors end at byte {end} of {self.size - 4}")
        return AprFile(self._metadata(metadata_size), tensors, flags)

    def _check_flags(self, flags: int) -> None:
        for flag, what in _REFUSED.items():
            if flags & flag:
                raise GraftuneError(f"uses {what}", where=str(self.path), fix="export it without")
        if flags & ~_KNOWN_FLAGS or not flags & ROW_MAJOR:
            raise self.damaged(f"its flags are {flags:#x}")

    def _check_sum(self) -> None:
        checksum = 0
        with memoryview(self.data) as view:
            for start in range(0, self.size - 4, 1 << 22):
                checksum = zlib.crc32(view[start : min(start + (1 << 22), self.size - 4)], checksum)
        if checksum != struct.unpack("<I", self.data[self.size - 4 :])[0]:
            raise self.damaged("it does not match its checksum")

    def _metadata(self, size: int) -> dict[str, Any]:
        def refuse(word: str) -> None:
            raise ValueError(word)

        try:
            values = json.loads(self.data[ALIGN : ALIGN + size].decode(), parse_constant=refuse)
        except (ValueError, RecursionError):
            raise self.damaged("its metadata is not valid JSON") from None
        if not isinstance(values, dict) or self._filled(ALIGN + size, ALIGN + _padded(size)):
            raise self.damaged("its metadata is not a JSON object")
        return values

    def _filled(self, start: int, stop: int) -> bool:
        """Whether there is a nonzero byte where padding has to be."""
        return any(self.data[start:stop])

    def _tensors(self, count: int, at: int, data_at: int) -> tuple[dict[str, AprTensor], int]:
        if count * LEAST_ENTRY > data_at - at:
            raise self.damaged(f"claims {count} tensors, more than its index can hold")
        found: dict[str, AprTensor] = {}
        place, before = data_at, b""
        try:
            for _ in range(count):
                (length,) = struct.unpack_from("<H", self.data, at)
                name, (code, dims) = self.data[at + 2 : at + 2 + length], self.data[at + 2 + length : at + 4 + length]
                at += 4 + length
                if not before < name or length > MOST_NAME or dims > MOST_DIMS or at > data_at:
                    raise self.damaged("its index is not in order")
                *shape, offset, size = struct.unpack_from(f"<{dims}QQQ", self.data, at)
                at, before = at + 8 * dims + 16, name
                found[name.decode()] = self._tensor(code, tuple(shape), data_at + offset, size, place)
                place += _padded(size)
        except (struct.error, ValueError) as error:
            if isinstance(error, GraftuneError):
                raise
            raise self.damaged("its index makes no sense") from None
        if _padded(at) != data_at or self._filled(at, data_at):
            raise self.damaged("its index does not end where its data begin")
        return found, place

    def _tensor(self, code: int, shape: tuple[int, ...], at: int, size: int, place: int) -> AprTensor:
        name = _BY_CODE.get(code)
        if name is None:
            raise self.damaged(f"tensor type {code} does not exist")
        kind, last = KINDS[name], shape[-1] if shape else 1
        if last % kind.values or size != math.prod(shape[:-1]) * (last // kind.values) * kind.bytes:
            raise self.damaged(f"a tensor {list(shape)} of {name} cannot be {size} bytes")
        if at != place or at + _padded(size) > self.size - 4 or self._filled(at + size, at + _padded(size)):
            raise self.damaged(f"a tensor lies at byte {at}, where none can be")
        if not size:
            return AprTensor(name, shape, torch.empty(0, dtype=torch.uint8))
        return AprTensor(name, shape, torch.frombuffer(self.data, dtype=torch.uint8, count=size, offset=at))
