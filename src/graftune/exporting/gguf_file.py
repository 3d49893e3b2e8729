"""Writes a GGUF file: header values, tensor table, then the tensors, a few rows at a time.

The keys of a GGUF base are copied as bytes, so that unknown keys keep their types: the gguf package's writer takes
Python values and guesses the width of a number. New keys are encoded here. What was written is read back with our own
reader (weights/streamed.py).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from gguf.constants import GGMLQuantizationType, GGUFValueType

from graftune.arithmetic import ceil_div
from graftune.weights.gguf_io import MAGIC, header_bytes, read_gguf
from graftune.weights.streamed import UNWATCHED, OutputTensor, Watcher, check_tensor, misread, write_tensor

ALIGNMENT = 32
_FORMS = {
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
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
    """The keys of a file that `read_gguf` read before, each with its type and value as they are stored."""
    return dict(header_bytes(path))


def padded(size: int) -> int:
    return ceil_div(size, ALIGNMENT) * ALIGNMENT


def write_gguf(
    path: Path, keys: Mapping[str, bytes], tensors: Sequence[OutputTensor], watcher: Watcher = UNWATCHED
) -> None:
    """Writes the file to a place that `files.new_file` gave, and reads it back."""
    with path.open("wb") as file:
        sums = _write(file, keys, tensors, watcher)
    watcher.on_bytes(None, 0)
    _check(path, keys, tensors, sums)


def _write(file: BinaryIO, keys: Mapping[str, bytes], tensors: Sequence[OutputTensor], watcher: Watcher) -> list[int]:
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
        sums.append(write_tensor(file, tensor, watcher))
        file.write(bytes(padded(tensor.nbytes) - tensor.nbytes))
    return sums


def _check(path: Path, keys: Mapping[str, bytes], tensors: Sequence[OutputTensor], sums: Sequence[int]) -> None:
    found = read_gguf(path)
    if header_of(path) != dict(keys):
        raise misread("other keys than were written", path)
    if list(found.tensors) != [tensor.name for tensor in tensors]:
        raise misread("other tensors than were written", path)
    for tensor, check in zip(tensors, sums, strict=True):
        back = found.tensors[tensor.name]
        check_tensor(tensor, back, [back.blocks.reshape(-1).data], check, path)
