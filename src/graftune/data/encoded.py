"""Encoded examples in one file that is mapped, not read.

A million conversations are gigabytes as Python lists, and a few hundred megabytes as bytes that the operating system
keeps or drops as it likes. So examples are written as they are made and looked at where they lie:

    magic | per chunk: tokens, mask (a bit per token), texts, lines about rows left out | index | header | trailer

Examples with numbers per token (weights, or what a loss reads) have them behind their chunk's mask. The index has an
entry per example in plain arrays (`INDEX`); further columns, for numbers and for groups, are only there where the data
has any. The header is JSON: where the arrays are, what the file was made from, what became of the data. The trailer,
written last, has the header's place and checksum, so a file that was cut short or written over is found out before
anything in it is believed. writer.py writes the file. Rejected: a file per array, which takes a folder that is never
whole in one rename; a database, which cannot be mapped as arrays.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from graftune.arithmetic import ceil_div
from graftune.batch import Example
from graftune.data.summary import Summary
from graftune.errors import GraftuneError
from graftune.io.json_file import NotJson, parse_json

MAGIC = b"graftune data 1\n"
TRAILER = struct.Struct("<qq32s16s")  # the header's place and length, its SHA-256, the magic once more
# Per example. `at` and `mask` are where its tokens (in bytes) and flags (in bits) begin. `row` is the source row's key
# over all files. `texts` is where its prompt begins, in front of the reference and the messages (JSON), with the
# lengths of the three. An example that occurs several times per epoch has several entries and is stored once.
INDEX = {
    "at": "<i8", "mask": "<i8", "count": "<u4", "responses": "<u4", "row": "<i8", "texts": "<i8",
    "prompt": "<u4", "reference": "<u4", "messages": "<u4",
}  # fmt: skip
# Columns that only some data has. PER_TOKEN and a name: where an example's numbers of that name begin (float32, one per
# token; -1: it has none). NUMBER and a name: its one number of that name (NaN: it has none). WEIGHT_SUM: the weights of
# its response tokens added up. GROUP: the number of its group (-1: it is alone). SHORTENED: 1 where it is (else -1).
PER_TOKEN, NUMBER, WEIGHT_SUM, GROUP, SHORTENED = "per token: ", "number: ", "weight_sum", "group", "shortened"
WEIGHTS = "weights"  # the numbers per token that every loss knows
DIGEST = 16  # bytes that stand for an example's tokens and mask


class Damaged(Exception):
    """A file that is not a whole one of this format."""


def damaged() -> GraftuneError:
    """Of content that no checksum covers: it was whole when the file was made."""
    return GraftuneError("encoded data is damaged", fix="delete the folder `data` in graftune's cache and start again")


def stored_json(text: str) -> Any:
    try:
        return parse_json(text)
    except NotJson:
        raise damaged() from None


class Store:
    """The file's content, where it lies. Raises Damaged."""

    def __init__(self, content: Any):
        """`content`: a map of the file, or its bytes."""
        self.content = content
        try:
            place, length, check, magic = TRAILER.unpack_from(content, len(content) - TRAILER.size)
            header = bytes(content[place : place + length])
            whole = place >= 0 and place + length + TRAILER.size == len(content) and content[: len(MAGIC)] == MAGIC
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
            own = [name for name in places if name not in INDEX and name not in ("digests", "used")]
            self.index |= {name: array_of(content, dtype_of(name), count, places[name]) for name in own}
            self.digests = array_of(content, f"V{DIGEST}", count, places["digests"])
            used = array_of(content, np.uint8, ceil_div(self.vocabulary, 8), places["used"])
            self.used = np.unpackbits(used, count=self.vocabulary, bitorder="little").astype(np.bool_)
            self.width = token_width(self.vocabulary)
            self._check_places(first)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
            raise Damaged(str(error)) from None
        except RecursionError:
            raise Damaged("nested too deeply") from None

    def _check_places(self, end: int) -> None:
        """Everything that the index names lies between the magic and the index, which begins at `end`: nothing that is
        looked at later can lie outside of the file."""
        index, counts = self.index, self.index["count"].astype(np.int64)
        spans = [
            (index["at"], self.width().itemsize * counts),
            (index["mask"] // 8, (index["mask"] % 8 + counts + 7) // 8),
            (index["texts"], sum(index[part].astype(np.int64) for part in ("prompt", "reference", "messages"))),
        ]
        for name, places in index.items():
            if name.startswith(PER_TOKEN):
                spans.append((places[places >= 0], 4 * counts[places >= 0]))
        self.detail_spans = np.array(self.header["details"], np.int64).reshape(-1, 2)
        spans.append((self.detail_spans[:, 0], self.detail_spans[:, 1]))
        for starts, sizes in spans:
            if len(starts) and not bool(((starts >= len(MAGIC)) & (sizes >= 0) & (starts <= end - sizes)).all()):
                raise Damaged("an example lies outside of the file")

    @staticmethod
    def open(path: Path) -> Store:
        with path.open("rb") as file:
            try:
                return Store(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except ValueError:  # an empty file cannot be mapped
                raise Damaged from None

    def check_summary(self) -> None:
        """What is said about the rows is a summary; raises Damaged."""
        try:
            Summary.of(self.header["summary"])
            str(self.header["kind"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise Damaged(str(error)) from None

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

    def per_token(self, i: int, name: str = WEIGHTS) -> np.ndarray | None:
        """An example's numbers of that name, one per token, if it has them."""
        places = self.index.get(PER_TOKEN + name)
        place = -1 if places is None else int(places[i])
        return None if place < 0 else np.frombuffer(self.content, np.float32, int(self.index["count"][i]), place)

    def numbers(self, i: int) -> dict[str, float | list[float]]:
        """All that the data says of an example beside weights, as `Example.numbers`."""
        found: dict[str, float | list[float]] = {}
        for column in self.index:
            if column.startswith(NUMBER) and not np.isnan(self.index[column][i]):
                found[column.removeprefix(NUMBER)] = float(self.index[column][i])
            name = column.removeprefix(PER_TOKEN)
            if column != name != WEIGHTS and (values := self.per_token(i, name)) is not None:
                found[name] = values.tolist()
        return found

    @property
    def kind(self) -> str:
        """What its records are (kind.py)."""
        return str(self.header["kind"])

    def text(self, i: int, name: str) -> str:
        """`prompt`, `reference` or `messages` (as JSON, empty where there are none)."""
        start, index = int(self.index["texts"][i]), self.index
        for part in ("prompt", "reference", "messages"):
            length = int(index[part][i])
            if part == name:
                return bytes(self.content[start : start + length]).decode("utf-8", "replace")
            start += length
        raise KeyError(name)

    def details(self) -> Iterator[tuple[int, str]]:
        """(row, why) for every row that was left out or dropped."""
        for start, length in self.detail_spans.tolist():
            for line in bytes(self.content[start : start + length]).split(b"\n"):
                found = stored_json(line.decode("utf-8", "replace")) if line else []
                if isinstance(found, list) and len(found) == 2:
                    yield found[0], str(found[1])


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
        weights = self.store.per_token(i)
        own = None if weights is None else weights.tolist()
        tokens, supervised = self.store.tokens(i).tolist(), self.store.supervised(i).tolist()
        if max(tokens, default=0) >= self.store.vocabulary:
            raise damaged()
        group = int(self.store.index[GROUP][i]) if GROUP in self.store.index else -1
        shortened = SHORTENED in self.store.index and bool(self.store.index[SHORTENED][i] > 0)
        return Example(tokens, supervised, row, own, group, self.store.numbers(i), shortened)

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
        if len(tokens) and int(tokens.max()) >= store.vocabulary:  # a device would end the process over it
            raise damaged()
        return tokens, np.concatenate([store.supervised(i) for i in chosen])
    total = sum(len(example.tokens) for example in examples)
    tokens = np.fromiter(chain.from_iterable(e.tokens for e in examples), dtype=np.int64, count=total)
    return tokens, np.fromiter(chain.from_iterable(e.supervised for e in examples), dtype=np.bool_, count=total)


def has_weights(examples: Sequence[Example]) -> bool:
    """Whether any of them has weights of its own."""
    if isinstance(examples, Examples):
        column = PER_TOKEN + WEIGHTS
        return column in examples.store.index and bool((examples.column(column) >= 0).any())
    return any(example.weights is not None for example in examples)


def weights_of(examples: Sequence[Example]) -> np.ndarray:
    """The weight of every token (float32), one example behind the other."""
    return token_numbers_of(examples, WEIGHTS, 1.0)


def token_numbers_of(examples: Sequence[Example], name: str, missing: float) -> np.ndarray:
    """What the data says under a name of every token (float32), one example behind the other: what a field of a batch
    reads. `missing`: of the tokens of examples that have none."""
    if isinstance(examples, Examples):
        store = examples.store
        found = [(store.per_token(i, name), int(store.index["count"][i])) for i in examples.chosen.tolist()]
    else:
        found = [(_listed(e, name), len(e.tokens)) for e in examples]
    return np.concatenate([np.full(count, missing, np.float32) if own is None else own for own, count in found])


def numbers_of(examples: Sequence[Example], name: str, missing: float) -> np.ndarray:
    """What the data says under a name of every example (float64); `missing`: of those that have none."""
    if isinstance(examples, Examples):
        column = NUMBER + name
        found = examples.column(column) if column in examples.store.index else np.full(len(examples), np.nan)
    else:
        found = np.array([_single(e, name) for e in examples], dtype=np.float64)
    return np.where(np.isnan(found), missing, found)


def groups_of(examples: Sequence[Example]) -> np.ndarray:
    """The number of every example's group; -1: it is alone."""
    if isinstance(examples, Examples):
        return examples.column(GROUP) if GROUP in examples.store.index else np.full(len(examples), -1)
    return np.fromiter((example.group for example in examples), np.int64, len(examples))


def kind_of(examples: Sequence[Example]) -> str | None:
    """What their records are; None where nothing says so, as of a list of examples."""
    return examples.store.kind if isinstance(examples, Examples) else None


def weight_sums_of(examples: Sequence[Example]) -> np.ndarray:
    """Of each, the sum of the weights of its response tokens."""
    if isinstance(examples, Examples):
        return examples.column(WEIGHT_SUM if WEIGHT_SUM in examples.store.index else "responses").astype(np.float64)
    return np.fromiter((example.response_weight for example in examples), np.float64, len(examples))


def _listed(example: Example, name: str) -> np.ndarray | None:
    values = example.weights if name == WEIGHTS else example.numbers.get(name)
    assert values is None or isinstance(values, list), f"{name} is one number, where one per token is asked for"
    assert values is None or len(values) == len(example.tokens), f"{name}: a number per token"
    return None if values is None else np.asarray(values, dtype="<f4")


def _single(example: Example, name: str) -> float:
    value = example.numbers.get(name, math.nan)
    assert not isinstance(value, list), f"{name} is a number per token, where one per example is asked for"
    return value


def dtype_of(column: str) -> str:
    """Of a column that only some data has."""
    return "<f8" if column == WEIGHT_SUM or column.startswith(NUMBER) else "<i8"


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


def token_width(vocabulary: int) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def as_json(value: Any) -> bytes:
    return _ENCODER.encode(value).encode("ascii")
