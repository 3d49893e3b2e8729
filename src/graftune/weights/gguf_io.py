"""Reads a GGUF file in place: the header as Python values, tensors as views of the memory map.

The gguf package supplies the constants and the dequantisation, but not the reader: its own reads every vocabulary
string through numpy (2.8 s for SmolLM2, ten times as long as this) and does not limit what a damaged header may ask
for. Here every count, length and offset is checked against the file's size before it is used.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.kernels import gguf_dequant
from graftune.private import find
from graftune.weights.opening import open_map

MAGIC = b"GGUF"
TYPE_TRAITS = {kind.name: traits for kind, traits in find("gguf.quants._type_traits").items()}
MOST_ENTRIES = 1 << 23  # of a vocabulary, or bytes of a text: a header may not grow with the size of its file
LARGEST_ALIGNMENT = 1 << 16
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the map: rows of blocks, dequantised only when and where they are read (a RowSource)."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # in torch's order: slowest dimension first
    blocks: np.ndarray[Any, Any]  # [rows, bytes of a row], a view of the map

    @property
    def dtype_name(self) -> str:
        return self.kind.name

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._dequantised(self.blocks[start:stop])

    def raw(self, start: int, stop: int) -> torch.Tensor:
        """The bytes of rows as the file has them, [rows, bytes of a row]: a copy, for an upload to a device."""
        return torch.from_numpy(np.array(self.blocks[start:stop]))

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """The given rows in fp32: an embedding lookup that touches no other row."""
        return self._dequantised(self.blocks[ids.cpu().numpy()])

    def values(self) -> torch.Tensor:
        return self.read(0, len(self.blocks)).view(self.shape)

    def _dequantised(self, rows: np.ndarray[Any, Any]) -> torch.Tensor:
        if self.kind.name in _PLAIN:
            values = rows.view(_PLAIN[self.kind.name]).astype(np.float32)
        elif self.kind.name in gguf_dequant.KINDS:  # the package's own takes 1.3 to 2.6 times as long
            out = torch.empty(len(rows), self.shape[-1])
            gguf_dequant.dequantise(torch.from_numpy(np.array(rows)).view(len(rows), -1), self.kind.name, out)
            return out
        else:
            values = dequantize(rows, self.kind)
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(len(rows), self.shape[-1])


@dataclass
class GgufFile:
    parts: tuple[Path, ...]  # its files: several if it is split
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor] = field(repr=False)


def read_model(path: Path) -> GgufFile:
    """Reads a whole model: one file, or all parts NAME-00001-of-00003.gguf of a split model, of which any may be given.
    The first part describes the model; each part states its number and the number of parts."""
    file = read_gguf(path)
    count = file.metadata.get("split.count", 1)
    if count in (0, 1):
        return file
    names = part_names(path.name)
    if len(names) != count:
        raise GraftuneError(
            f"is one of {count!r} parts of a split model, under another name than NAME-00001-of-0000N.gguf",
            where=str(path),
            fix="give the parts their names back",
        )
    paths = tuple(path.with_name(name) for name in names)
    missing = next((part for part in paths if not part.is_file()), None)
    if missing is not None:
        raise GraftuneError("this part of a split model is missing", where=str(missing), fix="download it too")
    whole = GgufFile(paths, {}, {})
    for number, part in enumerate(paths):
        one = file if part == path else read_gguf(part)
        if one.metadata.get("split.count") != count or one.metadata.get("split.no") != number:
            raise GraftuneError(
                f"says it is part {one.metadata.get('split.no')!r} of {one.metadata.get('split.count')!r}",
                where=str(part),
                fix="the parts are mixed up: download them again",
            )
        whole.tensors.update(one.tensors)
        whole.metadata = whole.metadata or one.metadata
    declared = whole.metadata.get("split.tensors.count")
    if declared != len(whole.tensors):
        raise GraftuneError(
            f"its parts hold {len(whole.tensors)} tensors of {declared!r}",
            where=str(paths[0]),
            fix="the parts belong to different models: download them again",
        )
    return whole


def part_names(name: str) -> list[str]:
    """The names of all files of the model that the file `name` belongs to: itself, or all parts of a split model."""
    match = PART.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def read_gguf(path: str | Path) -> GgufFile:
    """Reads one file: a model, a part of a split model, or an adapter."""
    path = Path(path)
    cursor, tensor_count = _opened(path)
    metadata: dict[str, Any] = {}
    for key, _, value in cursor.entries():
        if key in metadata:  # readers differ in which one they take
            raise cursor.broken(f"the key {key!r} occurs twice")
        metadata[key] = value
    described = [cursor.tensor() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.broken(f"general.alignment is {alignment!r}")
    start = ceil_div(cursor.at, alignment) * alignment
    raw = np.frombuffer(cursor.data, dtype=np.uint8)
    tensors = {}
    for name, shape, kind, offset in described:
        if offset % alignment:
            raise cursor.broken(f"tensor {name!r} begins at byte {offset}, not a multiple of {alignment}")
        if name in tensors:
            raise cursor.broken(f"tensor {name!r} occurs twice")
        tensors[name] = _placed(cursor, raw, name, shape, kind, start + offset)
    return GgufFile((path,), metadata, tensors)


def _opened(path: Path) -> tuple[_Cursor, int]:
    """(a cursor in the file's header, behind the number of tensors; that number)."""
    cursor = _Cursor(open_map(path), path)
    if cursor.take(4) != MAGIC:
        raise GraftuneError("is not a GGUF file", where=str(path), fix="give a .gguf model or a Hugging Face folder")
    version = cursor.unpack("<I")
    if version not in (2, 3):
        raise GraftuneError(f"has GGUF version {version}", where=str(path), fix="only little-endian 2 and 3 are read")
    return cursor, cursor.count(24)


def header_bytes(path: Path) -> dict[str, bytes]:
    """Each key of a file that `read_gguf` has read before, with its type and value as they are stored."""
    cursor, _ = _opened(path)
    return {key: cursor.data[start : cursor.at] for key, start, _ in cursor.entries()}


def is_adapter_file(path: Path) -> bool:
    """Whether a GGUF file declares itself an adapter. A damaged file is refused when it is read as a whole."""
    try:
        cursor, _ = _opened(path)
        for key, _, value in cursor.entries():
            if key == "general.type":
                return bool(value == "adapter")
            if key.startswith("tokenizer."):  # most of a model's header, after the keys that describe it
                return False
    except GraftuneError:
        pass
    return False


def _placed(
    cursor: _Cursor, raw: np.ndarray[Any, Any], name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, at: int
) -> GgufTensor:
    if kind.name not in _PLAIN and kind.name not in TYPE_TRAITS:
        raise GraftuneError(
            f"tensor {name!r} is {kind.name}, which cannot be dequantised",
            where=str(cursor.path),
            fix="give a file in another quantisation",
        )
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise cursor.broken(f"tensor {name!r} has rows of {shape[-1]} values, not a multiple of its block of {block}")
    row_bytes = shape[-1] // block * block_bytes
    rows = math.prod(shape[:-1])  # Python's: four huge dimensions must not wrap around
    end = at + rows * row_bytes
    if end > len(raw):
        raise GraftuneError(
            f"tensor {name!r} ends at byte {end} of a file of {len(raw)}",
            where=str(cursor.path),
            fix="the file is cut short: download it again",
        )
    return GgufTensor(kind, shape, raw[at:end].reshape(rows, row_bytes))


class _Cursor:
    """Reads the header within the bounds of the file: every size is compared with the bytes that are left."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.at, self.size = data, path, 0, len(data)

    def broken(self, what: str) -> GraftuneError:
        return GraftuneError(what, where=str(self.path), fix="the file is damaged: download it again")

    def take(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise self.broken(f"the header ends early, at byte {self.size}")
        piece = self.data[self.at : self.at + count]
        self.at += count
        return piece

    def unpack(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, least_bytes: int) -> int:
        """Reads a u64 count of entries that take at least `least_bytes` each."""
        value = self.unpack("<Q")
        if value * least_bytes > self.size - self.at:
            raise self.broken(f"the header claims {value} entries, more than the file can hold")
        if value > MOST_ENTRIES:
            raise self.broken(f"the header claims {value} entries, more than any model has")
        return int(value)

    def text(self) -> str:
        # Vocabularies may hold pieces that are not UTF-8: surrogates keep their bytes.
        return self.take(self.count(1)).decode("utf-8", errors="surrogateescape")

    def entries(self) -> Iterator[tuple[str, int, Any]]:
        """Yields (key, where its type and value begin, value) of all keys; the cursor is then behind that value."""
        for _ in range(self.count(13)):
            key, start = self.text(), self.at
            yield key, start, self.value(self.value_type())

    def value_type(self) -> GGUFValueType:
        code = self.unpack("<I")
        try:
            return GGUFValueType(code)
        except ValueError:
            raise self.broken(f"metadata type {code} does not exist") from None

    def value(self, kind: GGUFValueType, depth: int = 0) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            inner = self.value_type()
            if inner == GGUFValueType.STRING:
                return self._texts(self.count(8))
            if inner == GGUFValueType.ARRAY:
                if depth > 3:
                    raise self.broken("metadata arrays are nested too deeply")
                return [self.value(inner, depth + 1) for _ in range(self.count(12))]
            form = _SCALARS[inner]
            count = self.count(struct.calcsize(form))
            return np.frombuffer(self.take(count * struct.calcsize(form)), dtype=np.dtype(form)).tolist()
        return self.unpack(_SCALARS[kind])

    def _texts(self, count: int) -> list[str]:
        """Reads an array of strings, the bulk of a header, in one tight loop over the map."""
        data, at, size, length_of = self.data, self.at, self.size, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            if at + 8 > size:
                raise self.broken(f"the header ends early, at byte {size}")
            (length,) = length_of(data, at)
            at += 8
            if length > size - at:
                raise self.broken(f"the header ends early, at byte {size}")
            found.append(data[at : at + length].decode("utf-8", errors="surrogateescape"))
            at += length
        self.at = at
        return found

    def tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, dimensions = self.text(), self.unpack("<I")
        if not 1 <= dimensions <= 4:
            raise self.broken(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.unpack("<Q") for _ in range(dimensions))[::-1]
        code, offset = self.unpack("<I"), self.unpack("<Q")
        if any(not 0 < n < 2**40 for n in shape):
            raise self.broken(f"tensor {name!r} has the shape {list(shape)}")
        try:
            return name, shape, GGMLQuantizationType(code), offset
        except ValueError:
            raise self.broken(f"tensor {name!r} has the unknown type {code}") from None
