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
_NUMBERS = {bool: (GGUFValueType.BOOL, "?"), int: (GGUFValueType.UINT32, "I"), float: (GGUFValueType.FLOAT32, "f")}
_LISTED = _NUMBERS | {int: (GGUFValueType.INT32, "i")}


def encoded(value: str | float | list[Any]) -> bytes:
    """The type and the value of a key."""
    if isinstance(value, str):
        return struct.pack("<I", GGUFValueType.STRING) + _text(value)
    if not isinstance(value, list):
        kind, form = _NUMBERS[type(value)]
        return struct.pack(f"<I{form}", kind, value)
    if not value or isinstance(value[0], str):
        return struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType.STRING, len(value)) + b"".join(map(_text, value))
    kind, form = _LISTED[type(value[0])]
    return struct.pack(f"<IIQ{len(value)}{form}", GGUFValueType.ARRAY, kind, len(value), *value)


def _text(value: str) -> bytes:
    encoded = value.encode("utf-8", errors="surrogateescape")
    return struct.pack("<Q", len(encoded)) + encoded


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
    if header_bytes(path) != dict(keys):
        raise misread("other keys than were written", path)
    if list(found.tensors) != [tensor.name for tensor in tensors]:
        raise misread("other tensors than were written", path)
    for tensor, check in zip(tensors, sums, strict=True):
        back = found.tensors[tensor.name]
        check_tensor(tensor, back, [back.blocks.reshape(-1).data], check, path)
