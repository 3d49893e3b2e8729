"""The first layers of a GGUF as a file of their own: real weights, tokenizer and blocks, at a fraction of the time."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from gguf import GGUFValueType

from graftune.weights.gguf_io import header_bytes, read_gguf

ALIGNMENT = 32


def first_layers(whole: Path, layers: int, out: Path) -> Path:
    file, keys = read_gguf(whole), header_bytes(whole)
    keys[f"{file.metadata['general.architecture']}.block_count"] = struct.pack("<II", GGUFValueType.UINT32, layers)
    numbers = {name: re.match(r"blk\.(\d+)\.", name) for name in file.tensors}
    kept = {n: file.tensors[n] for n, number in numbers.items() if number is None or int(number[1]) < layers}
    header, at = b"GGUF" + struct.pack("<IQQ", 3, len(kept), len(keys)), 0
    header += b"".join(_text(key) + value for key, value in keys.items())
    for name, tensor in kept.items():
        sizes = tensor.shape[::-1]
        header += _text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, tensor.kind, at)
        at += _padded(tensor.nbytes)
    with out.open("wb") as made:
        made.write(header.ljust(_padded(len(header)), b"\0"))
        for tensor in kept.values():
            made.write(tensor.blocks.tobytes().ljust(_padded(tensor.nbytes), b"\0"))
    return out


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
