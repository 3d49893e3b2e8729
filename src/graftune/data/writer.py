"""Writes encoded examples into the file that encoded.py describes, as they are made."""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from graftune.batch import Example
from graftune.data.encoded import (
    DIGEST,
    GROUP,
    INDEX,
    MAGIC,
    NUMBER,
    PER_TOKEN,
    SHORTENED,
    TRAILER,
    WEIGHT_SUM,
    WEIGHTS,
    as_json,
    dtype_of,
    short,
    token_width,
)  # fmt: skip

_CODES = {"<i8": "q", "<u4": "I"}


class Entry(NamedTuple):
    """An example on its way into the file, with what sample answers need of it (see Dataset)."""

    example: Example
    prompt: str
    reference: str
    messages: list[dict[str, Any]]
    times: int = 1  # per epoch; the same for all of a group, which is repeated as a whole


class Writer:
    """Writes chunks as they come; `close` adds the index and the header. Holds about 90 bytes per example."""

    def __init__(self, file: BinaryIO, vocabulary: int):
        self.file, self.vocabulary = file, vocabulary
        self.index = {name: array(_CODES[code]) for name, code in INDEX.items()}
        self.own: dict[str, dict[int, float]] = {}  # columns that only some data has: by name, of which examples
        self.groups = 0
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
        """One chunk: its examples, and (row, why) for each row that was left out. Groups are whole within a chunk."""
        tokens = array("I")
        for entry in entries:
            tokens.extend(entry.example.tokens)
        flags = b"".join(bytes(entry.example.supervised) for entry in entries)
        wide = np.frombuffer(tokens, dtype=np.uint32)
        self.used[wide] = True
        width = token_width(self.vocabulary)
        size = width().itemsize
        at = self._write(wide.astype(width).tobytes() + bytes(-len(tokens) * size % 8))
        mask = 8 * self._write(np.packbits(np.frombuffer(flags, dtype=np.uint8), bitorder="little").tobytes())
        own = [self._own(entry.example) for entry in entries]
        first, canonical, texts, place = 0, memoryview(tokens).cast("B"), list[bytes](), self.at
        made: list[tuple[bytes, dict[str, int]]] = []  # the digest and the index of each entry
        for entry in entries:
            example, count = entry.example, len(entry.example.tokens)
            last = first + count
            digest = hashlib.blake2b(canonical[4 * first : 4 * last], digest_size=DIGEST)
            digest.update(flags[first:last])
            if example.weights is not None:
                digest.update(_per_token(example, WEIGHTS).tobytes())
            if example.numbers:
                digest.update(as_json(dict(sorted(example.numbers.items()))))
            words = (
                entry.prompt.encode(),
                entry.reference.encode(),
                as_json(entry.messages) if entry.messages else b"",
            )
            values = at + first * size, mask + first, count, flags.count(1, first + 1, last), example.row, place
            made.append((digest.digest(), dict(zip(INDEX, (*values, *map(len, words)), strict=True))))
            self.repeats += entry.times - 1
            place += sum(map(len, words))
            texts.extend(words)
            first = last
        for unit in _units(entries):
            for _ in range(entries[unit[0]].times):
                self._enter(entries, unit, made, own)
        self._write(b"".join(texts))
        lines = b"".join(as_json([row, why]) + b"\n" for row, why in details)
        if lines:
            self.details.append((self._write(lines), len(lines)))

    def _enter(
        self,
        entries: Sequence[Entry],
        unit: Sequence[int],
        made: Sequence[tuple[bytes, dict[str, int]]],
        own: Sequence[dict[str, float]],
    ) -> None:
        """One more occurrence of an example, or of a group of them."""
        for number in unit:
            digest, values = made[number]
            example = len(self.index["at"])
            for name, value in values.items():
                self.index[name].append(value)
            for name, found in own[number].items():
                self.own.setdefault(name, {})[example] = found
            if entries[number].example.group >= 0:
                self.own.setdefault(GROUP, {})[example] = self.groups
            self.digests += digest
        self.groups += entries[unit[0]].example.group >= 0

    def _own(self, example: Example) -> dict[str, float]:
        """Of an example's numbers what the index has: single ones, and where those of its tokens are."""
        found: dict[str, float] = {SHORTENED: 1} if example.shortened else {}
        if example.weights is not None:
            weights = _per_token(example, WEIGHTS)
            found[PER_TOKEN + WEIGHTS] = self._write(weights.tobytes())
            on = np.asarray(example.supervised[1:], dtype=np.bool_)
            found[WEIGHT_SUM] = float(weights[1:].sum(where=on, dtype=np.float64))
        for name, value in example.numbers.items():
            if isinstance(value, list):
                found[PER_TOKEN + name] = self._write(_per_token(example, name).tobytes())
            else:
                found[NUMBER + name] = float(value)
        return found

    def duplicates(self) -> int:
        """Examples that repeat one of another row, token for token and with the same mask."""
        kinds = np.unique(short(np.frombuffer(bytes(self.digests), dtype=f"V{DIGEST}")))
        return len(self.digests) // DIGEST - self.repeats - len(kinds)

    def close(self, **facts: Any) -> None:
        """`facts` go into the header as they are."""
        parts = {name: np.frombuffer(values, dtype=INDEX[name]).tobytes() for name, values in self.index.items()}
        for name, found in self.own.items():
            parts[name] = self._column(name, found).tobytes()
        parts |= {"digests": bytes(self.digests), "used": np.packbits(self.used, bitorder="little").tobytes()}
        self._write(bytes(-self.at % 8))
        places, check = {}, 0
        for name, content in parts.items():
            content += bytes(-len(content) % 8)
            places[name] = self._write(content)
            check = zlib.crc32(content, check)
        header = as_json(
            facts
            | {"examples": len(self.index["at"]), "vocabulary": self.vocabulary, "details": self.details}
            | {"arrays": places, "check": check}
        )
        place = self._write(header)
        self._write(TRAILER.pack(place, len(header), hashlib.sha256(header).digest(), MAGIC))
        self.file.flush()

    def _column(self, name: str, found: dict[int, float]) -> np.ndarray:
        """Of every example: -1 where it has no place or group or is whole, NaN where it has no number; the sum of
        weights of one without any is the number of its response tokens."""
        count = len(self.index["at"])
        if name == WEIGHT_SUM:
            column = np.frombuffer(self.index["responses"], "<u4").astype(dtype_of(name))
        else:
            column = np.full(count, np.nan if name.startswith(NUMBER) else -1, dtype_of(name))
        column[list(found)] = list(found.values())
        return column


def _units(entries: Sequence[Entry]) -> Iterator[list[int]]:
    """What is repeated as one: the entries of a group, or one."""
    unit: list[int] = []
    for number, entry in enumerate(entries):
        if unit and (entry.example.group < 0 or entry.example.group != entries[unit[0]].example.group):
            yield unit
            unit = []
        unit.append(number)
    if unit:
        yield unit


def _per_token(example: Example, name: str) -> np.ndarray:
    values = example.weights if name == WEIGHTS else example.numbers[name]
    assert isinstance(values, list) and len(values) == len(example.tokens), f"{name}: a number per token"
    return np.asarray(values, dtype="<f4")
