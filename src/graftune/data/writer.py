"""Writes encoded examples into the file that encoded.py describes, as they are made.

Contents (tokens, texts ...) grow in temporary files of their own and are joined at the end; columns are
held in memory, about 110 bytes per example.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import shutil
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np

from graftune.batch import Example
from graftune.data.encoded import (
    COLUMNS,
    DIGEST,
    MAGIC,
    NUMBER,
    PLACES,
    TRAILER,
    WEIGHTS,
    TokenStore,
    dtype_of,
    short,
)

_CODES = {"<i8": "q", "<u4": "I", "<f8": "d", "<u1": "B"}
IN_MEMORY = 1 << 20  # bytes of a content before it gets a file
_JSON = json.JSONEncoder(separators=(",", ":"))


class NewExample(NamedTuple):
    """An example to be written, with the texts that sample answers need (see Dataset)."""

    example: Example
    prompt: str
    reference: str
    messages: list[dict[str, Any]]
    times: int = 1  # per epoch; the same for all of a group, which is repeated as a whole


class StoreWriter:
    """Takes examples in chunks; `close` writes the file."""

    def __init__(self, vocabulary: int, folder: Path | None = None):
        """`folder`: for the temporary files; None: the system's own folder for them."""
        self.vocabulary, self.folder = vocabulary, None if folder is None else str(folder)
        new_file = functools.partial(tempfile.SpooledTemporaryFile, IN_MEMORY, dir=self.folder)
        self.contents: dict[str, IO[bytes]] = defaultdict(new_file)
        self.columns: dict[str, array[Any]] = {
            name: array(_CODES[code]) for name, code in COLUMNS.items() if name != "digest"
        }
        self.numbers: dict[str, dict[int, float]] = {}  # of examples that have one, by name
        self.digests = bytearray()
        self.groups = 0
        self.used = np.zeros(vocabulary, dtype=np.bool_)  # tokens that occur
        for name in ("tokens", "texts", "details"):
            self._append(name, b"")  # the file has these contents even if they are empty

    def _append(self, name: str, content: bytes) -> int:
        """Append bytes to a content; returns its new length in bytes."""
        self.contents[name].write(content)
        return self.contents[name].tell()

    def add(self, entries: Sequence[NewExample], details: Iterable[tuple[int, str]] = ()) -> None:
        """One chunk: its examples, and (row, why) for each row that was left out. Groups are whole within a chunk."""
        tokens = array("I")
        for entry in entries:
            tokens.extend(entry.example.tokens)
        flags = b"".join(bytes(entry.example.supervised) for entry in entries)
        wide = np.frombuffer(tokens, dtype=np.uint32)
        self.used[wide] = True
        kind = dtype_of("tokens", self.vocabulary)
        marks = np.frombuffer(flags, np.uint8).astype(kind) << (8 * kind.itemsize - 1)
        reached = self.contents["tokens"].tell() // kind.itemsize
        self._append("tokens", (wide.astype(kind) | marks).tobytes())
        begin, canonical, number = 0, memoryview(tokens).cast("B"), len(self.columns["row"])
        for entry in entries:
            end = begin + len(entry.example.tokens)
            digest = hashlib.blake2b(canonical[4 * begin : 4 * end], digest_size=DIGEST)
            digest.update(flags[begin:end])
            self._add_example(entry, flags.count(1, begin + 1, end), digest)
            self.columns["tokens_end"].append(reached + end)
            begin = end
        self._add_occurrences(entries, number)
        lines = b"".join(_as_json([row, why]) + b"\n" for row, why in details)
        self._append("details", lines)

    def _add_example(self, entry: NewExample, responses: int, digest: Any) -> None:
        example, columns, i = entry.example, self.columns, len(self.columns["row"])
        weight_sum = float(responses)
        if example.weights is not None:
            assert len(example.weights) == len(example.tokens), "a weight per token"
            weights = np.asarray(example.weights, dtype="<f4")
            self._fill_weights()
            self._append(WEIGHTS, weights.tobytes())
            digest.update(weights.tobytes())
            on = np.asarray(example.supervised[1:], dtype=np.bool_)
            weight_sum = float(weights[1:].sum(where=on, dtype=np.float64))
        if example.numbers:
            digest.update(_as_json(dict(sorted(example.numbers.items()))))
        for name, value in example.numbers.items():
            assert not isinstance(value, list), f"{name}: numbers per token are not stored"
            self.numbers.setdefault(name, {})[i] = float(value)
        messages = _as_json(entry.messages) if entry.messages else b""
        for text in (entry.prompt.encode(), entry.reference.encode(), messages):
            columns["texts_end"].append(self._append("texts", text))
        columns["responses"].append(responses)
        columns["row"].append(example.row)
        columns["weight_sum"].append(weight_sum)
        columns["shortened"].append(example.shortened)
        self.digests += digest.digest()

    def _fill_weights(self) -> None:
        """Write NaN for the tokens of examples without weights."""
        tokens = self.columns["tokens_end"][-1] if self.columns["tokens_end"] else 0
        while gap := tokens - self.contents[WEIGHTS].tell() // 4:
            self._append(WEIGHTS, np.full(min(gap, 1 << 20), np.nan, "<f4").tobytes())

    def _add_occurrences(self, entries: Sequence[NewExample], first: int) -> None:
        """Examples of a group are repeated together, each time as a group of its own."""

        def unit_of(numbered: tuple[int, NewExample]) -> int:
            group = numbered[1].example.group
            return group if group >= 0 else -1 - numbered[0]

        for unit, found in itertools.groupby(enumerate(entries, first), unit_of):
            members = list(found)
            for _ in range(members[0][1].times):
                self.columns["order"].extend(number for number, _ in members)
                self.columns["group"].extend([self.groups if unit >= 0 else -1] * len(members))
                self.groups += unit >= 0

    def duplicates(self) -> int:
        """Examples that repeat one of another row, token for token and with the same mask."""
        digests = np.frombuffer(bytes(self.digests), dtype=f"V{DIGEST}")
        return len(digests) - len(np.unique(short(digests)))

    def close(self, file: BinaryIO, **facts: Any) -> None:
        """Write the file. `facts` go into the header as they are."""
        arrays: dict[str, tuple[int, int]] = {}
        at = file.write(MAGIC)
        if WEIGHTS in self.contents:
            self._fill_weights()
        for name, content in self.contents.items():
            size = content.tell()
            arrays[name] = (at, size // dtype_of(name, self.vocabulary).itemsize)
            content.seek(0)
            shutil.copyfileobj(content, file, 1 << 20)
            content.close()
            at += size + file.write(bytes(-size % 8))
        columns_at, check = at, hashlib.sha256()
        for name, values in self._finished_columns().items():
            arrays[name] = (at, len(values))
            content_bytes = values.tobytes() + bytes(-values.nbytes % 8)
            at += file.write(content_bytes)
            check.update(content_bytes)
        header = _as_json(facts | {"arrays": arrays, "vocabulary": self.vocabulary})
        check.update(header + PLACES.pack(columns_at, at))
        file.write(header + TRAILER.pack(columns_at, at, check.digest(), MAGIC))
        file.flush()

    def _finished_columns(self) -> dict[str, np.ndarray]:
        columns = {name: np.frombuffer(values, COLUMNS[name]) for name, values in self.columns.items()}
        columns |= {"digest": np.frombuffer(bytes(self.digests), COLUMNS["digest"]), "used": self.used}
        count = len(columns["row"])
        for name, found in self.numbers.items():
            columns[NUMBER + name] = np.full(count, np.nan)
            columns[NUMBER + name][list(found)] = list(found.values())
        return columns

    def in_memory(self, **facts: Any) -> TokenStore:
        file = io.BytesIO()
        self.close(file, **facts)
        return TokenStore(file.getvalue())


def _as_json(value: Any) -> bytes:
    return _JSON.encode(value).encode("ascii")
