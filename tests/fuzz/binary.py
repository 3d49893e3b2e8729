"""Binary formats taken apart, damaged by their parts and put together again, checksums included: a damage that only a
checksum notices says nothing about the code behind it.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from graftune.data import encoded
from tests.fuzz.mutate import NUMBERS, TEXTS, dumped, some_bytes, some_tree

WORD = 2**64 - 1
FORMS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


def extreme(draw: Random, bits: int = 64) -> int:
    return int(draw.choice(NUMBERS[:23])) & (2**bits - 1)


# GGUF.


@dataclass
class Gguf:
    """A header as lists; counts are those of the lists unless they are set."""

    keys: list[tuple[bytes, bytes]]  # name, type and value as bytes
    tensors: list[tuple[bytes, tuple[int, ...], int, int]]  # name, dimensions, type, offset
    data: bytes
    version: int = 3
    counts: tuple[int, int] | None = None
    dimensions: dict[int, int] = field(default_factory=dict)  # lies about how many a tensor has

    def bytes(self) -> bytes:
        tensors, keys = self.counts or (len(self.tensors), len(self.keys))
        parts = [b"GGUF", struct.pack("<IQQ", self.version, tensors & WORD, keys & WORD)]
        parts += [told(name) + value for name, value in self.keys]
        for place, (name, shape, kind, offset) in enumerate(self.tensors):
            count = self.dimensions.get(place, len(shape))
            parts.append(told(name) + struct.pack("<I", count) + struct.pack(f"<{len(shape)}Q", *shape))
            parts.append(struct.pack("<IQ", kind, offset))
        head = b"".join(parts)
        return head + bytes(-len(head) % 32) + self.data


def told(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def typed(value: Any) -> bytes:
    """A value with its type before it."""
    if isinstance(value, list):
        kind, parts = _element(value[0])
        return (
            struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(_element(one)[1] for one in value) if parts else b""
        )
    kind, content = _element(value)
    return struct.pack("<I", kind) + content


def _element(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    return STRING, told(value.encode("utf-8", "surrogatepass"))


def any_typed(draw: Random) -> bytes:
    kind = draw.randrange(8)
    if kind == 0:
        return typed(draw.choice(TEXTS))
    if kind == 1:
        code = draw.choice(list(FORMS))
        return struct.pack("<I", code) + bytes(draw.randrange(256) for _ in range(struct.calcsize(FORMS[code])))
    if kind == 2:  # an array that claims a number of entries
        return struct.pack("<IIQ", ARRAY, draw.choice((*FORMS, STRING, ARRAY)), extreme(draw)) + bytes(
            draw.randrange(80)
        )
    if kind == 3:
        depth = draw.choice((1, 2, 3, 4, 5, 60, 2000))
        return struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, draw.choice((1, 1, 2))) * depth + bytes(24)
    if kind == 4:
        return typed([draw.choice(TEXTS) for _ in range(draw.choice((1, 3, 300)))])
    if kind == 5:
        return typed(draw.choice((0, 1, 2**31, 2**32 - 1, 1e30, -1.0, True, False)))
    if kind == 6:
        return struct.pack("<I", draw.choice((13, 99, 2**31, 2**32 - 1))) + bytes(8)
    return struct.pack("<IQ", STRING, extreme(draw)) + b"abc"


def some_gguf(draw: Random, seed: Gguf) -> bytes:
    made = replace(seed, keys=list(seed.keys), tensors=list(seed.tensors), dimensions={})
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        kind = draw.randrange(10)
        if kind < 4 and made.keys:
            _some_key(draw, made)
        elif kind < 8 and made.tensors:
            _some_tensor(draw, made)
        elif kind == 8:
            made.counts = draw.choice(
                (
                    (extreme(draw), len(made.keys)),
                    (len(made.tensors), extreme(draw)),
                    (len(made.tensors) + 1, len(made.keys) - 1),
                )
            )
        else:
            made.version = draw.choice((0, 1, 2, 3, 4, 2**24 * 3, 2**32 - 1))
            made.data = draw.choice((made.data, b"", made.data[: draw.randrange(len(made.data) + 1)], made.data * 2))
    found = made.bytes()
    return some_bytes(draw, found) if draw.random() < 0.25 else found


def _some_key(draw: Random, made: Gguf) -> None:
    at, how = draw.randrange(len(made.keys)), draw.randrange(8)
    name, value = made.keys[at]
    if how == 0:
        made.keys.insert(draw.randrange(len(made.keys) + 1), (name, any_typed(draw)))  # a key twice
    elif how == 1:
        del made.keys[at]
    elif how == 2:
        made.keys[at] = (draw.choice(TEXTS).encode("utf-8", "surrogatepass"), value)
    elif how == 3:
        made.keys[at] = (name, struct.pack("<I", draw.randrange(14)) + value[4:])  # another type for the same bytes
    elif how == 4:
        made.keys.append((b"general.alignment", typed(draw.choice((0, 1, 3, 8, 31, 33, 64, 2**31, -1, 1.5, "32")))))
    elif how == 5:
        made.keys[at] = (name, made.keys[draw.randrange(len(made.keys))][1])
    elif how == 6:
        made.keys[at] = (name, value[:4] + some_bytes(draw, value[4:], 1))
    else:
        made.keys[at] = (name, any_typed(draw))


def _some_tensor(draw: Random, made: Gguf) -> None:
    at, how = draw.randrange(len(made.tensors)), draw.randrange(8)
    name, shape, kind, offset = made.tensors[at]
    if how == 0:
        made.tensors.insert(draw.randrange(len(made.tensors) + 1), made.tensors[at])  # a name twice
    elif how == 1:
        del made.tensors[at]
    elif how == 2 and shape:
        place = draw.randrange(len(shape))
        shape = (*shape[:place], extreme(draw), *shape[place + 1 :])
    elif how == 3:
        shape = tuple(draw.choice((1, 2, 32, 2**31, 2**32, 2**33 + 1)) for _ in range(draw.randrange(7)))
    elif how == 4:
        kind = draw.choice((*range(45), 2**31, 2**32 - 1))
    elif how == 5:
        offset = draw.choice((extreme(draw), offset + 1, offset + 32, made.tensors[0][3], max(0, offset - 32)))
    elif how == 6:
        name = draw.choice((*TEXTS, "a" * 70)).encode("utf-8", "surrogatepass")
    else:
        made.dimensions[at] = extreme(draw, 32)
    if how > 1:
        made.tensors[at] = (name, shape, kind, offset & WORD)


# safetensors.


def some_safetensors(draw: Random, header: dict[str, Any], data: bytes) -> bytes:
    made = dumped(some_tree(draw, header))
    if draw.random() < 0.3:  # places that fit the file, over each other or apart
        made = dumped(_moved(draw, header, len(data)))
    if draw.random() < 0.2:
        data = draw.choice((b"", data[: draw.randrange(len(data) + 1)], data + bytes(9), data * 2))
    length = extreme(draw) if draw.random() < 0.1 else len(made)
    if draw.random() < 0.05:
        made += b" " * draw.choice((1, 7, 100_000))
    found = length.to_bytes(8, "little") + made + data
    return some_bytes(draw, found) if draw.random() < 0.2 else found


def _moved(draw: Random, header: dict[str, Any], size: int) -> dict[str, Any]:
    names = [name for name in header if name != "__metadata__"]
    copy = {name: dict(header[name]) for name in header}
    for name in draw.sample(names, min(len(names), draw.choice((1, 2)))):
        start, stop = copy[name]["data_offsets"]
        how = draw.randrange(5)
        if how == 0:
            start, stop = start - 4, stop - 4
        elif how == 1:
            start, stop = stop, start
        elif how == 2:
            stop = size + draw.choice((1, 8, 2**40, 2**63))
        elif how == 3:
            copy[name]["shape"] = draw.choice(([2**32, 2**32], [stop - start], [], [0], [1] * 70, [2**63, 0], [-1, -4]))
        else:
            copy[name]["dtype"] = draw.choice(
                ("F8_E4M3", "F8_E5M2", "I64", "U8", "BOOL", "F4", "F6_E2M3", "C64", "F64", "BF16")
            )
        copy[name]["data_offsets"] = [start, stop]
    return copy


# APR.

APR_HEADER = struct.Struct("<4sBBHIQIQQI20s")


@dataclass
class Apr:
    metadata: Any
    index: list[tuple[bytes, int, tuple[int, ...], int, int]]  # name, type, shape, offset, size
    data: bytes


def apart(whole: bytes) -> Apr:
    _, _, _, _, count, _, size, index_at, data_at, _, _ = APR_HEADER.unpack(whole[:64])
    index, at = [], index_at
    for _ in range(count):
        (length,) = struct.unpack_from("<H", whole, at)
        name, code, dims = whole[at + 2 : at + 2 + length], whole[at + 2 + length], whole[at + 3 + length]
        *shape, offset, held = struct.unpack_from(f"<{dims}QQQ", whole, at + 4 + length)
        index.append((name, code, tuple(shape), offset, held))
        at += 4 + length + 8 * dims + 16
    return Apr(json.loads(whole[64 : 64 + size]), index, whole[data_at:-4])


def some_apr(draw: Random, seed: Apr) -> bytes:
    index, data, flags, count = list(seed.index), seed.data, 1024, None
    metadata = dumped(some_tree(draw, seed.metadata)) if draw.random() < 0.5 else dumped(seed.metadata)
    for _ in range(draw.choice((0, 1, 1, 2))):
        index = _some_index(draw, index)
    if draw.random() < 0.1:
        flags, count = draw.choice(((extreme(draw, 16), None), (1024, extreme(draw, 32)), (1056, None)))
    if draw.random() < 0.1:
        data = draw.choice((b"", data[:-1], data + bytes(64), some_bytes(draw, data)))
    told_index = b"".join(
        struct.pack("<H", len(name)) + name + struct.pack(f"<BB{len(shape)}QQQ", code, len(shape), *shape, at, size)
        for name, code, shape, at, size in index
    )
    index_at = 64 + _padded(len(metadata))
    numbers = [
        count if count is not None else len(index),
        64,
        len(metadata),
        index_at,
        index_at + _padded(len(told_index)),
    ]
    if draw.random() < 0.1:
        place = draw.randrange(5)
        numbers[place] = extreme(draw, 32 if place in (0, 2) else 64)
    header = APR_HEADER.pack(b"APR\0", 2, 0, flags, *numbers, 0, bytes(20))
    if draw.random() < 0.95:
        check = zlib.crc32(header[44:64], zlib.crc32(header[:40]))
        header = APR_HEADER.pack(b"APR\0", 2, 0, flags, *numbers, check, bytes(20))
    whole = header + metadata + bytes(-len(metadata) % 64) + told_index + bytes(-len(told_index) % 64) + data
    if draw.random() < 0.1:
        whole = some_bytes(draw, whole)
    return whole + struct.pack("<I", zlib.crc32(whole) if draw.random() < 0.95 else draw.randrange(2**32))


def _padded(size: int) -> int:
    return size + -size % 64


def _some_index(draw: Random, index: list[Any]) -> list[Any]:
    index = list(index)
    at, how = draw.randrange(len(index)), draw.randrange(7)
    name, code, shape, offset, size = index[at]
    if how == 0:
        index.insert(at, index[at])
        return index
    if how == 1:
        index.reverse()
        return index
    if how == 2:
        name = draw.choice((*TEXTS, "z" * 257)).encode("utf-8", "surrogatepass")[:65535]
    elif how == 3:
        code = draw.choice((*range(32), 255))
    elif how == 4:
        shape = tuple(draw.choice((0, 1, 2, 2**32, 2**63, *shape)) for _ in range(draw.choice((0, 1, 2, 8, 9, 200))))
    elif how == 5:
        offset = draw.choice((extreme(draw), offset + 64, 0))
    else:
        size = draw.choice((extreme(draw), size + 1, 0))
    index[at] = (name, code, shape, offset, size)
    return index


# The file of encoded data.


def some_cache(draw: Random, whole: bytes) -> bytes:
    """The header as a tree and the arrays as bytes, under checksums that are right."""
    place, length, _, magic = encoded.TRAILER.unpack_from(whole, len(whole) - encoded.TRAILER.size)
    header, body = json.loads(whole[place : place + length]), bytearray(whole[:place])
    first = min(header["arrays"].values())
    for _ in range(draw.choice((0, 1, 1, 3))):
        at = draw.randrange(first, len(body) - 8)
        size = draw.choice((1, 4, 8))
        body[at : at + size] = extreme(draw).to_bytes(8, "little")[:size]
    if draw.random() < 0.3:
        body[:first] = some_bytes(draw, bytes(body[:first]))[:first].ljust(first, b"\0")
    header["check"] = zlib.crc32(bytes(body[first:]))
    told_header = dumped(some_tree(draw, header)) if draw.random() < 0.6 else dumped(header)
    sha = hashlib.sha256(told_header).digest()
    fields = [len(body), len(told_header), sha, magic]
    if draw.random() < 0.05:
        fields[draw.randrange(2)] = extreme(draw, 63)
    found = bytes(body) + told_header + encoded.TRAILER.pack(*fields)
    return some_bytes(draw, found) if draw.random() < 0.1 else found
