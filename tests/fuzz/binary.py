"""Binary formats as trees of numbers, bytes and lists: damaged like any other tree, then packed again with checksums
that are right. A damage that only a checksum notices says nothing about the code behind it.

Counts and lengths are stored as differences from the true ones, so that they stay right until they are damaged.
"""

from __future__ import annotations

import json
import struct
import zlib
from random import Random
from typing import Any

from graftune.data import encoded
from tests.fuzz.mutate import dumped, extreme, some_bytes, some_fields, some_tree

WORD = 2**64 - 1
Tree = dict[str, Any]


def number(value: int, bits: int = 64) -> bytes:
    return (value & (2**bits - 1)).to_bytes(bits // 8, "little")


# GGUF.


def typed(value: Any) -> bytes:
    """A value of the metadata with its type before it."""
    kind, content = _element(value)
    return number(kind, 32) + content


def _element(value: Any) -> tuple[int, bytes]:
    if isinstance(value, list):
        return 9, number(_element(value[0])[0], 32) + number(len(value)) + b"".join(_element(one)[1] for one in value)
    if isinstance(value, bool):
        return 7, number(value, 8)
    if isinstance(value, int):
        return 4, number(value, 32)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    return 8, _counted(value.encode())


def _counted(text: bytes) -> bytes:
    return number(len(text)) + text


def gguf(keys: dict[str, Any], tensors: list[tuple[bytes, tuple[int, ...], int, int]], data: bytes) -> Tree:
    """A whole file. A tensor has its name, dimensions, type and offset."""
    return {
        "version": 3,
        "more_tensors": 0,
        "more_keys": 0,
        "keys": [(key.encode(), typed(value)) for key, value in keys.items()],
        "tensors": [(name, list(shape), 0, kind, offset) for name, shape, kind, offset in tensors],
        "data": data,
    }


def gguf_bytes(tree: Tree) -> bytes:
    counts = (len(tree["tensors"]) + tree["more_tensors"], len(tree["keys"]) + tree["more_keys"])
    parts = [b"GGUF", number(tree["version"], 32), *map(number, counts)]
    parts += [_counted(name) + value for name, value in tree["keys"]]
    for name, shape, more, kind, offset in tree["tensors"]:
        parts += [_counted(name), number(len(shape) + more, 32), *map(number, shape), number(kind, 32), number(offset)]
    head = b"".join(parts)
    return head + bytes(-len(head) % 32) + tree["data"]


def some_gguf(draw: Random, seed: Tree) -> bytes:
    found = gguf_bytes(some_fields(draw, seed))
    return some_bytes(draw, found) if draw.random() < 0.25 else found


# safetensors.


def some_safetensors(draw: Random, header: dict[str, Any], data: bytes) -> bytes:
    """Places that fit the file, over each other or apart, or any damage to the header."""
    made = dumped(some_fields(draw, header) if draw.random() < 0.4 else some_tree(draw, header))
    if draw.random() < 0.2:
        data = some_bytes(draw, data)
    length = extreme(draw) if draw.random() < 0.1 else len(made)
    found = number(length) + made + data
    return some_bytes(draw, found) if draw.random() < 0.2 else found


# APR.

APR_HEADER = struct.Struct("<4sBBHIQIQQI20s")


def apr(whole: bytes) -> Tree:
    _, _, _, flags, count, _, size, index_at, data_at, _, _ = APR_HEADER.unpack(whole[:64])
    index, at = [], index_at
    for _ in range(count):
        (length,) = struct.unpack_from("<H", whole, at)
        name, code, dims = whole[at + 2 : at + 2 + length], whole[at + 2 + length], whole[at + 3 + length]
        *shape, offset, held = struct.unpack_from(f"<{dims}QQQ", whole, at + 4 + length)
        index.append((name, code, shape, offset, held))
        at += 4 + length + 8 * dims + 16
    metadata = json.loads(whole[64 : 64 + size])
    return {"flags": flags, "more": (0,) * 5, "metadata": metadata, "index": index, "data": whole[data_at:-4]}


def apr_bytes(tree: Tree, metadata: bytes) -> bytes:
    index = b"".join(
        number(len(name), 16) + name + number(code, 8) + number(len(shape), 8) + b"".join(map(number, shape))
        + number(offset) + number(size)
        for name, code, shape, offset, size in tree["index"]
    )  # fmt: skip
    metadata_part, index_part = (part + bytes(-len(part) % 64) for part in (metadata, index))
    true = (len(tree["index"]), 64, len(metadata), 64 + len(metadata_part), 64 + len(metadata_part) + len(index_part))
    count, at, size, index_at, data_at = (a + b for a, b in zip(true, tree["more"], strict=True))
    fields = (count & 0xFFFFFFFF, at & WORD, size & 0xFFFFFFFF, index_at & WORD, data_at & WORD)
    head = b"APR\0", 2, 0, tree["flags"] & 0xFFFF, *fields
    unsigned = APR_HEADER.pack(*head, 0, bytes(20))
    header = APR_HEADER.pack(*head, zlib.crc32(unsigned[44:64], zlib.crc32(unsigned[:40])), bytes(20))
    whole = header + metadata_part + index_part + tree["data"]
    return whole + number(zlib.crc32(whole), 32)


def some_apr(draw: Random, seed: Tree) -> bytes:
    metadata = dumped(some_tree(draw, seed["metadata"]) if draw.random() < 0.5 else seed["metadata"])
    rest = {key: value for key, value in seed.items() if key != "metadata"}
    found = apr_bytes(some_fields(draw, rest) if draw.random() < 0.8 else rest, metadata)
    return some_bytes(draw, found) if draw.random() < 0.1 else found


# The file of encoded data.


def some_cache(draw: Random, whole: bytes) -> bytes:
    """The columns, the header or the trailer damaged: they are under a checksum."""
    place, *_ = encoded.TRAILER.unpack_from(whole, len(whole) - encoded.TRAILER.size)
    return whole[:place] + some_bytes(draw, whole[place:])
