"""Writes and reads an adapter as one APR file, and the APR v2 container.

A and B are stored unscaled in fp32 as lora.LAYER.PROJECTION.lora_a and .lora_b; a reader multiplies by lora_alpha /
lora_rank. Rank-stabilised adapters are scaled by alpha over the root of the rank, so their lora_alpha is stored
multiplied by that root, and other readers compute the right product too. Trained norms and tables with added tokens are
stored under our own names. The key `graftune` has what only graftune reads: the base, its hash and the template.

The container is a header, flat JSON metadata, an index of tensors and their bytes, under two checksums:

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
import re
import struct
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.io.files import new_file
from graftune.model.families import FAMILIES, MODULES, family_of, modules_of, short_targets
from graftune.model.spec import ModelSpec
from graftune.settings.sections import LoraConfig
from graftune.weights import experts, rows
from graftune.weights.adapter_fit import Adapter, adapted_paths, fitted
from graftune.weights.opening import open_map

SCHEMA = "1.3.0"
_OURS = re.compile(r"layers\.(\d+)\.([\w.]+)\.lora_([AB])\.weight")
_STORED = re.compile(r"lora\.(\d+)\.([\w.]+)\.lora_([ab])")
_BESIDE = re.compile(r"(layers\.\d+\.[\w.]*)?\w*norm\.weight|(embed_tokens|lm_head)\.weight")
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


def save_apr(path: Path, adapter: Adapter, spec: ModelSpec, facts: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Writes an adapter. `facts` about the training, as far as known: epoch, val_loss, data_hash, started_at."""
    adapter = fitted(adapter, spec)
    lora = adapter.lora
    loss = facts.get("val_loss")
    metadata = {
        "__checkpoint__.schema_version": SCHEMA,
        "model_type": "adapter",
        "epoch": facts.get("epoch", 0),
        "val_loss": loss if isinstance(loss, int | float) and math.isfinite(loss) else None,
        "architecture": spec.family,
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha * math.sqrt(lora.rank) if lora.rslora else lora.alpha,
        "hidden_size": spec.width,
        "num_layers": len(spec.layers),
        "num_heads": spec.describe()["heads"],
        "num_kv_heads": spec.describe()["kv_heads"],
        "vocab_size": spec.vocab,
        "data_hash": facts.get("data_hash", ""),
        "provenance": {"tool": "graftune", "started_at": facts.get("started_at", "")},
        "graftune": {
            "base": adapter.base_name,
            "base_sha256": adapter.base_sha256,
            "revision": adapter.revision,
            "template": adapter.template,
            "append_eos": adapter.append_eos,
            "rslora_alpha": lora.alpha if lora.rslora else None,
            "dropout": lora.dropout,
            "new_tokens": list(lora.new_tokens),
        },
    }
    ordered = {name: rows.adapter_to_file(t, "folder", spec, name) for name, t in adapter.tensors.items()}
    modules = modules_of(family_of(spec).block_names)
    write(path, AprFile(metadata, {_stored(name, modules): value.float() for name, value in ordered.items()}))


def _stored(name: str, modules: Mapping[str, Collection[str]]) -> str:
    """A tensor's name in the file. It states the projection's name, or its path if several modules of the family have a
    projection of that name."""
    if experts.is_expert_adapter(name):
        raise GraftuneError("an APR file has no place for adapters on experts", fix="export to peft or gguf-lora")
    match = _OURS.fullmatch(name)
    if match is None:
        return name
    last = match[2].rpartition(".")[2]
    return f"lora.{match[1]}.{match[2] if len(modules[last]) > 1 else last}.lora_{match[3].lower()}"


def load_apr(path: Path) -> Adapter:
    file = read(path)
    get = file.metadata.get
    if get("model_type") != "adapter":
        raise GraftuneError(f"holds {get('model_type')!r}, not an adapter", where=str(path), fix="give an adapter")
    if not str(get("__checkpoint__.schema_version", SCHEMA)).startswith("1."):
        raise GraftuneError("was written by a newer schema", where=str(path), fix=f"write it as {SCHEMA}")
    for key in ("lora_rank", "lora_alpha"):
        value = get(key)
        if not _is_sensible(value):
            raise GraftuneError(f"its {key} is {value!r}", where=str(path), fix="export the adapter again")
    found = get("graftune")
    ours: dict[str, Any] = found if isinstance(found, dict) else {}
    family = FAMILIES.get(str(get("architecture")))
    modules = MODULES if family is None else modules_of(family.block_names)
    tensors = {_ours(name, modules, path): tensor.float() for name, tensor in file.tensors.items()}
    return Adapter(
        path,
        _settings(file.metadata, ours, tensors, modules, path),
        tensors,
        str(ours.get("base") or ""),
        str(ours.get("base_sha256") or ""),
        "none" if ours.get("template") == "none" else "auto",
        ours.get("append_eos") is True,
        str(ours.get("revision") or ""),
        order="folder",
    )


def _ours(stored: str, modules: Mapping[str, Collection[str]], path: Path) -> str:
    """Our name of a tensor in the file. `modules`: the modules that may hold each projection."""
    match = _STORED.fullmatch(stored)
    if match:
        within, _, last = match[2].rpartition(".")
        found = [module for module in modules.get(last, ()) if within in ("", module)]
        if len(found) == 1:
            place = f"{found[0]}.{last}".removeprefix(".")
            return f"layers.{match[1]}.{place}.lora_{match[3].upper()}.weight"
    elif _BESIDE.fullmatch(stored):
        return stored
    raise GraftuneError(f"the adapter uses {stored}", where=str(path), fix="this cannot be loaded here")


def _is_sensible(value: Any) -> bool:
    """Whether the value can be a rank or an alpha."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**31


def _settings(
    metadata: Mapping[str, Any],
    ours: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    modules: Mapping[str, Collection[str]],
    path: Path,
) -> LoraConfig:
    rank, plain, stabilised = metadata["lora_rank"], metadata["lora_alpha"], ours.get("rslora_alpha")
    adapted = adapted_paths(tensors)
    new_tokens = ours.get("new_tokens") or []
    dropout = ours.get("dropout") or 0.0
    sound = stabilised is None or _is_sensible(stabilised)
    sound = sound and isinstance(dropout, int | float) and 0 <= dropout < 1
    if not adapted or not sound or not isinstance(new_tokens, list) or not all(isinstance(t, str) for t in new_tokens):
        raise GraftuneError("its settings make no sense", where=str(path), fix="export the adapter again")
    return LoraConfig(
        rank=int(rank),
        alpha=float(plain if stabilised is None else stabilised),
        dropout=float(dropout),
        rslora=stabilised is not None,
        targets=short_targets(adapted, modules),
        train_norms=any(name.endswith("norm.weight") for name in tensors),
        new_tokens=tuple(new_tokens),
    )


# The container


@dataclass(frozen=True)
class AprFile:
    metadata: dict[str, Any]
    tensors: Mapping[str, torch.Tensor]


def write(path: Path, file: AprFile) -> None:
    """Writes beside the target, reads back, flushes, and renames over the target."""
    with new_file(path) as aside:
        with aside.open("wb") as out:
            checksum = 0
            for piece in _pieces(file):
                out.write(piece)
                checksum = zlib.crc32(piece, checksum)
            out.write(struct.pack("<I", checksum))
        read(aside)  # compares the checksums with what is on the disk


def _pieces(file: AprFile) -> list[bytes | memoryview]:
    """The file's bytes in order, without the checksum in its last four bytes."""
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
