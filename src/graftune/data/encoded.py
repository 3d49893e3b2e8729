"""Encoded examples in one file that is mapped, not read.

A million conversations are gigabytes as Python lists, and a few hundred megabytes as bytes that the operating system
keeps or drops as it likes. So examples are written as they are made and looked at where they lie:

    magic | per chunk: tokens, mask (a bit per token), texts, lines about rows left out | index | header | trailer

Examples with weights have them behind their chunk's mask; the part of the index that says where (`WEIGHTS`) is only
there if there are any. The index has an entry per example in plain arrays (`INDEX`). The header is JSON: where the
arrays are, what the file was made from, what became of the data. The trailer, written last, has the header's place and
checksum, so a file that was cut short or written over is found out before anything in it is believed. Rejected: a file
per array, which takes a folder that is never whole in one rename; a database, which cannot be mapped as arrays.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from graftune.arithmetic import ceil_div
from graftune.batch import Example

MAGIC = b"graftune data 1\n"
_TRAILER = struct.Struct("<qq32s16s")  # the header's place and length, its SHA-256, the magic once more
# Per example. `at` and `mask` are where its tokens (in bytes) and flags (in bits) begin. `row` is the source row's key
# over all files. `texts` is where its prompt begins, in front of the reference and the messages (JSON), with the
# lengths of the three. An example that occurs several times per epoch has several entries and is stored once.
INDEX = {
    "at": "<i8", "mask": "<i8", "count": "<u4", "responses": "<u4", "row": "<i8", "texts": "<i8",
    "prompt": "<u4", "reference": "<u4", "messages": "<u4",
}  # fmt: skip
# Of data with weights: where an example's begin (float32, one per token; -1: it has none), and those of its response
# tokens added up.
WEIGHTS = {"weights": "<i8", "weight_sum": "<f8"}
_CODES = {"<i8": "q", "<u4": "I"}
DIGEST = 16  # bytes that stand for an example's tokens and mask


class Entry(NamedTuple):
    """An example on its way into the file, with what sample answers need of it (see Dataset)."""

    example: Example
    prompt: str
    reference: str
    messages: list[dict[str, Any]]
    times: int = 1  # per epoch


class Damaged(Exception):
    """A file that is not a whole one of this format."""


class Writer:
    """Writes chunks as they come; `close` adds the index and the header. Holds about 90 bytes per example."""

    def __init__(self, file: BinaryIO, vocabulary: int):
        self.file, self.vocabulary = file, vocabulary
        self.index = {name: array(_CODES[code]) for name, code in INDEX.items()}
        self.weights: dict[int, tuple[int, float]] = {}  # by example: where they are, and their sum
        self.digests = bytearray()
        self.details: list[tuple[int, int]] = []  # where lines about rows left out are, in bytes
        self.used = np.zeros(vocabulary, dtype=np.bool_)  # tokens that occur
        self.repeats = 0  # entries beyond an example's first
        self.at = 0
        self._write(MAGIC)

    def _write(self, content: bytes) -> int:
        """Where it begins."""
        start = self.at
        self.file.write(content)
        self.at += len(content)
        return start

    def add(self, entries: Sequence[Entry], details: Iterable[tuple[int, str]] = ()) -> None:
        """One chunk: its examples, and (row, why) for each row that was left out."""
        tokens = array("I")
        for entry in entries:
            tokens.extend(entry.example.tokens)
        flags = b"".join(bytes(entry.example.supervised) for entry in entries)
        wide = np.frombuffer(tokens, dtype=np.uint32)
        self.used[wide] = True
        width = _width(self.vocabulary)
        size = width().itemsize
        at = self._write(wide.astype(width).tobytes() + bytes(-len(tokens) * size % 8))
        mask = 8 * self._write(np.packbits(np.frombuffer(flags, dtype=np.uint8), bitorder="little").tobytes())
        places = self._write_weights(entries)
        index, first, canonical = self.index, 0, memoryview(tokens).cast("B")
        texts: list[bytes] = []
        place = self.at
        for number, entry in enumerate(entries):
            example, count = entry.example, len(entry.example.tokens)
            last = first + count
            digest = hashlib.blake2b(canonical[4 * first : 4 * last], digest_size=DIGEST)
            digest.update(flags[first:last])
            if example.weights is not None:
                digest.update(_weights(example).tobytes())
            words = (entry.prompt.encode(), entry.reference.encode(), _json(entry.messages) if entry.messages else b"")
            responses = flags.count(1, first + 1, last)
            for _ in range(entry.times):
                if number in places:
                    self.weights[len(index["at"])] = places[number]
                self.digests += digest.digest()
                index["at"].append(at + first * size)
                index["mask"].append(mask + first)
                index["count"].append(count)
                index["responses"].append(responses)
                index["row"].append(example.row)
                index["texts"].append(place)
                index["prompt"].append(len(words[0]))
                index["reference"].append(len(words[1]))
                index["messages"].append(len(words[2]))
            self.repeats += entry.times - 1
            place += sum(map(len, words))
            texts.extend(words)
            first = last
        self._write(b"".join(texts))
        lines = b"".join(_json([row, why]) + b"\n" for row, why in details)
        if lines:
            self.details.append((self._write(lines), len(lines)))

    def _write_weights(self, entries: Sequence[Entry]) -> dict[int, tuple[int, float]]:
        """Of the entries that have weights: where they are, and the sum over response tokens."""
        places = {}
        for number, entry in enumerate(entries):
            if entry.example.weights is not None:
                weights = _weights(entry.example)
                total = float(weights[1:].sum(where=np.asarray(entry.example.supervised[1:]), dtype=np.float64))
                places[number] = self._write(weights.tobytes()), total
        return places

    def duplicates(self) -> int:
        """Examples that repeat one of another row, token for token and with the same mask."""
        kinds = np.unique(short(np.frombuffer(bytes(self.digests), dtype=f"V{DIGEST}")))
        return len(self.digests) // DIGEST - self.repeats - len(kinds)

    def close(self, **facts: Any) -> None:
        """`facts` go into the header as they are."""
        parts = {name: np.frombuffer(values, dtype=INDEX[name]).tobytes() for name, values in self.index.items()}
        if self.weights:
            sums = np.frombuffer(self.index["responses"], "<u4").astype("<f8")
            at = np.full(len(sums), -1, "<i8")
            for number, (place, total) in self.weights.items():
                at[number], sums[number] = place, total
            parts |= {"weights": at.tobytes(), "weight_sum": sums.tobytes()}
        parts |= {"digests": bytes(self.digests), "used": np.packbits(self.used, bitorder="little").tobytes()}
        self._write(bytes(-self.at % 8))
        places, check = {}, 0
        for name, content in parts.items():
            content += bytes(-len(content) % 8)
            places[name] = self._write(content)
            check = zlib.crc32(content, check)
        header = _json(
            facts
            | {"examples": len(self.index["at"]), "vocabulary": self.vocabulary, "details": self.details}
            | {"arrays": places, "check": check}
        )
        place = self._write(header)
        self._write(_TRAILER.pack(place, len(header), hashlib.sha256(header).digest(), MAGIC))
        self.file.flush()


class Store:
    """The file's content, where it lies. Raises Damaged."""

    def __init__(self, content: Any):
        """`content`: a map of the file, or its bytes."""
        self.content = content
        try:
            place, length, check, magic = _TRAILER.unpack_from(content, len(content) - _TRAILER.size)
            header = bytes(content[place : place + length])
            whole = place >= 0 and place + length + _TRAILER.size == len(content) and content[: len(MAGIC)] == MAGIC
            if not whole or magic != MAGIC or hashlib.sha256(header).digest() != check:
                raise Damaged
            self.header: dict[str, Any] = json.loads(header)
            self.vocabulary, places = int(self.header["vocabulary"]), self.header["arrays"]
            count = int(self.header["examples"])
            first = min(places.values())
            if zlib.crc32(memoryview(content)[first:place]) != self.header["check"]:
                raise Damaged
            array_of = np.frombuffer
            self.index = {name: array_of(content, code, count, places[name]) for name, code in INDEX.items()}
            kept = {name: code for name, code in WEIGHTS.items() if name in places}
            self.index |= {name: array_of(content, code, count, places[name]) for name, code in kept.items()}
            self.digests = array_of(content, f"V{DIGEST}", count, places["digests"])
            used = array_of(content, np.uint8, ceil_div(self.vocabulary, 8), places["used"])
            self.used = np.unpackbits(used, count=self.vocabulary, bitorder="little").astype(np.bool_)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise Damaged(str(error)) from None
        self.width = _width(self.vocabulary)

    @staticmethod
    def open(path: Path) -> Store:
        with path.open("rb") as file:
            try:
                return Store(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except ValueError:  # an empty file cannot be mapped
                raise Damaged from None

    def __len__(self) -> int:
        return len(self.digests)

    def tokens(self, i: int) -> np.ndarray:
        index = self.index
        return np.frombuffer(self.content, self.width, int(index["count"][i]), int(index["at"][i]))

    def supervised(self, i: int) -> np.ndarray:
        start, count = int(self.index["mask"][i]), int(self.index["count"][i])
        first = start // 8
        bits = np.frombuffer(self.content, np.uint8, (start + count + 7) // 8 - first, first)
        return np.unpackbits(bits, bitorder="little")[start - 8 * first :][:count].view(np.bool_)

    def weights(self, i: int) -> np.ndarray | None:
        place = int(self.index["weights"][i]) if "weights" in self.index else -1
        return None if place < 0 else np.frombuffer(self.content, np.float32, int(self.index["count"][i]), place)

    def text(self, i: int, name: str) -> str:
        """`prompt`, `reference` or `messages` (as JSON, empty where there are none)."""
        start, index = int(self.index["texts"][i]), self.index
        for part in ("prompt", "reference", "messages"):
            length = int(index[part][i])
            if part == name:
                return bytes(self.content[start : start + length]).decode()
            start += length
        raise KeyError(name)

    def details(self) -> Iterator[tuple[int, str]]:
        """(row, why) for every row that was left out or dropped."""
        for start, length in self.header["details"]:
            for line in bytes(self.content[start : start + length]).splitlines():
                row, why = json.loads(line)
                yield row, why


class Examples(Sequence[Example]):
    """Some of a store's examples, in an order of their own; each is made when it is looked at."""

    def __init__(self, store: Store, chosen: np.ndarray | None = None):
        self.store = store
        self.chosen = np.arange(len(store)) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Examples(self.store, self.chosen[place])
        i = int(self.chosen[place])
        row = int(self.store.index["row"][i])
        weights = self.store.weights(i)
        own = None if weights is None else weights.tolist()
        return Example(self.store.tokens(i).tolist(), self.store.supervised(i).tolist(), row, own)

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Examples):
            same = np.array_equal(self.digests, other.digests)
            return same and np.array_equal(self.column("row"), other.column("row"))
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} examples of {int(self.column('count').sum())} tokens>"

    def column(self, name: str) -> np.ndarray:
        return self.store.index[name][self.chosen]

    @property
    def digests(self) -> np.ndarray:
        return self.store.digests[self.chosen]


def take(examples: Sequence[Example], indices: Sequence[int]) -> Sequence[Example]:
    """These of the examples, in this order."""
    if isinstance(examples, Examples):
        return Examples(examples.store, examples.chosen[np.asarray(indices, dtype=np.int64)])
    return [examples[i] for i in indices]


def lengths_of(examples: Sequence[Example]) -> np.ndarray:
    """Tokens of each."""
    if isinstance(examples, Examples):
        return examples.column("count").astype(np.int64)
    return np.fromiter((len(example.tokens) for example in examples), np.int64, len(examples))


def responses_of(examples: Sequence[Example]) -> np.ndarray:
    """Response tokens of each."""
    if isinstance(examples, Examples):
        return examples.column("responses").astype(np.int64)
    return np.fromiter((example.response_tokens for example in examples), np.int64, len(examples))


def flat(examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
    """All tokens (int64) and flags, one example behind the other."""
    if isinstance(examples, Examples):
        store, chosen = examples.store, examples.chosen.tolist()
        tokens = np.concatenate([store.tokens(i) for i in chosen]).astype(np.int64)
        return tokens, np.concatenate([store.supervised(i) for i in chosen])
    total = sum(len(example.tokens) for example in examples)
    tokens = np.fromiter(chain.from_iterable(e.tokens for e in examples), dtype=np.int64, count=total)
    return tokens, np.fromiter(chain.from_iterable(e.supervised for e in examples), dtype=np.bool_, count=total)


def has_weights(examples: Sequence[Example]) -> bool:
    """Whether any of them has weights of its own."""
    if isinstance(examples, Examples):
        return "weights" in examples.store.index and bool((examples.column("weights") >= 0).any())
    return any(example.weights is not None for example in examples)


def weights_of(examples: Sequence[Example]) -> np.ndarray:
    """The weight of every token (float32), one example behind the other."""
    if isinstance(examples, Examples):
        found = [(examples.store.weights(i), int(examples.store.index["count"][i])) for i in examples.chosen.tolist()]
    else:
        found = [(None if e.weights is None else _weights(e), len(e.tokens)) for e in examples]
    return np.concatenate([np.ones(count, np.float32) if own is None else own for own, count in found])


def weight_sums_of(examples: Sequence[Example]) -> np.ndarray:
    """Of each, the sum of the weights of its response tokens."""
    if isinstance(examples, Examples):
        return examples.column("weight_sum" if "weight_sum" in examples.store.index else "responses").astype(np.float64)
    return np.fromiter((example.response_weight for example in examples), np.float64, len(examples))


def _weights(example: Example) -> np.ndarray:
    assert example.weights is not None and len(example.weights) == len(example.tokens), "a weight per token"
    return np.asarray(example.weights, dtype="<f4")


def short(digests: np.ndarray) -> np.ndarray:
    """Half of each digest as a number: enough to tell examples apart, and sorted several times as fast as bytes."""
    return np.ascontiguousarray(digests).view("<u8")[::2]


def distinct_tokens(*parts: Sequence[Example]) -> int:
    """How many tokens of the vocabulary occur. Counted by whole stores: what a part leaves out may be among them."""
    found: set[int] = set()
    stores = {id(part.store): part.store for part in parts if isinstance(part, Examples) and len(part)}
    for store in stores.values():
        found.update(np.flatnonzero(store.used).tolist())
    for part in parts:
        if not isinstance(part, Examples):
            found.update(chain.from_iterable(example.tokens for example in part))
    return len(found)


def _width(vocabulary: int) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def _json(value: Any) -> bytes:
    return _ENCODER.encode(value).encode("ascii")
