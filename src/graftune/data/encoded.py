"""Encoded examples in one file that is mapped, not read.

A million conversations are gigabytes as Python lists, and a few hundred megabytes as bytes that the operating system
keeps or drops as it likes. The file is a list of plain arrays:

    magic | contents: tokens, texts, weights of tokens, lines about rows left out | columns | header | trailer

The columns have one value per example (`COLUMNS`); `tokens_end` and `texts_end` say where the example's part of a
content ends, and it begins where the previous example's ends. A weight has the index of its token. The header is JSON:
where the arrays are, what the file was made from, the summary of the rows. The trailer, written last, has a digest of
columns and header, so a file that was cut short or overwritten is refused. writer.py writes the file. Rejected: a file
per array, which takes a folder that is never whole in one rename; a database, which cannot be mapped as arrays.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import mmap
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from graftune.batch import Example
from graftune.data.summary import Summary
from graftune.errors import GraftuneError

MAGIC = b"graftune data 3\n"
PLACES = struct.Struct("<qq")  # where the columns and the header begin
TRAILER = struct.Struct("<qq32s16s")  # these two, the SHA-256 of everything from the columns to here, the magic again
# `row` is the source row's key over all files. `texts_end` has three ends per example: prompt, reference and messages
# (JSON). `order` and `group` have one value per occurrence: an example that occurs several times per epoch is stored
# once. A group's number is -1 where the example is alone.
COLUMNS = {
    "tokens_end": "<i8", "texts_end": "<i8", "responses": "<u4", "row": "<i8", "weight_sum": "<f8", "shortened": "<u1",
    "digest": "V16", "order": "<i8", "group": "<i8",
}  # fmt: skip
# Only some data has these: a weight per token (float32), and numbers per example, each with a name (NaN: it has none).
WEIGHTS, NUMBER = "weights", "number: "
TEXTS = ("prompt", "reference", "messages")
DIGEST = 16  # bytes of the digest of an example's tokens, mask, weights and numbers


class DamagedStore(Exception):
    """The file is not a whole one of this format."""


def dtype_of(name: str, vocabulary: int) -> np.dtype[Any]:
    """The type of an array of the file by its name."""
    if name == "tokens":  # the highest bit of each says whether it is trained
        return np.dtype("<u2" if vocabulary <= 1 << 15 else "<u4")
    if name == WEIGHTS:
        return np.dtype("<f4")
    return np.dtype("<f8" if name.startswith(NUMBER) else COLUMNS.get(name, "<u1"))


class TokenStore:
    """The arrays of one file. Raises DamagedStore."""

    # log p under a loss's reference model (base or start): one number per example, or one per token. They are not in
    # the file (session/references.py).
    reference: np.ndarray | None = None
    reference_model = ""

    def __init__(self, content: Any):
        """`content`: a map of the file, or its bytes."""
        if len(content) < len(MAGIC) + TRAILER.size:
            raise DamagedStore("the file is cut short")
        end = len(content) - TRAILER.size
        columns, header, check, magic = TRAILER.unpack_from(content, end)
        if magic != MAGIC or hashlib.sha256(memoryview(content)[columns : end + PLACES.size]).digest() != check:
            raise DamagedStore("the columns or the header are not whole")
        self.header: dict[str, Any] = json.loads(content[header:end])
        self.vocabulary = int(self.header["vocabulary"])
        self.arrays: dict[str, np.ndarray] = {
            name: np.frombuffer(content, dtype_of(name, self.vocabulary), count, offset)
            for name, (offset, count) in self.header["arrays"].items()
        }
        self.arrays["count"] = np.diff(self.arrays["tokens_end"], prepend=0)

    @staticmethod
    def open(path: Path) -> TokenStore:
        with path.open("rb") as file:
            try:
                return TokenStore(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except ValueError:  # an empty file cannot be mapped
                raise DamagedStore from None

    def with_reference(self, model: str, *, per_token: bool) -> TokenStore:
        """The same store with a column for log-probabilities of a reference model, which are not known yet (NaN)."""
        made = copy.copy(self)
        made.reference_model = model
        counts = self.arrays["count"]
        size, kind = (int(counts.sum()), np.float32) if per_token else (len(counts), np.float64)
        made.reference = np.full(size, np.nan, kind)
        return made

    @functools.cached_property
    def starts(self) -> np.ndarray:
        return self.arrays["tokens_end"] - self.arrays["count"]

    @property
    def kind(self) -> str:
        """The name of the kind of its records (kind.py)."""
        return str(self.header["kind"])

    def summary(self) -> Summary:
        """The counts of the rows that were encoded, refused and shortened."""
        return Summary.of(self.header["summary"])

    def text(self, i: int, name: str) -> str:
        """`prompt`, `reference` or `messages` (as JSON, empty where there are none)."""
        ends, place = self.arrays["texts_end"], 3 * i + TEXTS.index(name)
        start = int(ends[place - 1]) if place else 0
        return self.arrays["texts"][start : int(ends[place])].tobytes().decode("utf-8", "replace")

    def details(self) -> Iterator[tuple[int, str]]:
        """(row, why) for every row that was left out or dropped."""
        for line in self.arrays["details"].tobytes().splitlines():
            row, why = json.loads(line)
            yield row, why


def split_flags(stored: np.ndarray, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits stored tokens into token ids (int64) and flags that say which are trained."""
    highest = np.iinfo(stored.dtype).max >> 1
    tokens = (stored & stored.dtype.type(highest)).astype(np.int64)
    if len(tokens) and int(tokens.max()) >= vocabulary:  # on a GPU such an id would abort the process
        raise GraftuneError(
            "encoded data is damaged", fix="delete the folder `data` in graftune's cache and start again"
        )
    return tokens, stored > highest


class Examples(Sequence[Example]):
    """Some of a store's examples, in any order. An `Example` is built when it is indexed."""

    def __init__(self, store: TokenStore, chosen: np.ndarray | None = None):
        """`chosen`: indices into the store's column `order`; None: all of it."""
        self.store = store
        self.chosen = np.arange(len(store.arrays["order"])) if chosen is None else chosen

    @property
    def stored(self) -> np.ndarray:
        """The numbers of the examples in the store."""
        return self.store.arrays["order"][self.chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Examples(self.store, self.chosen[place])
        one = Examples(self.store, self.chosen[[place]])
        tokens, supervised = flat(one)
        columns = {name: one.column(name)[0].item() for name in self.store.arrays if NUMBER in name}
        return Example(
            tokens.tolist(),
            supervised.tolist(),
            int(one.column("row")[0]),
            weights_of(one).tolist() if has_weights(one) else None,
            int(one.column("group")[0]),
            {name.removeprefix(NUMBER): number for name, number in columns.items() if not math.isnan(number)},
            bool(one.column("shortened")[0]),
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Examples):
            same = np.array_equal(self.digests, other.digests)
            return same and np.array_equal(self.column("row"), other.column("row"))
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} examples of {int(self.column('count').sum())} tokens>"

    def column(self, name: str) -> np.ndarray:
        """One value per example. The column `count` has the number of its tokens."""
        return self.store.arrays[name][self.chosen if name == "group" else self.stored]

    @property
    def digests(self) -> np.ndarray:
        return self.column("digest")


def take(examples: Sequence[Example], indices: Sequence[int]) -> Sequence[Example]:
    """The examples with these numbers, in this order."""
    if isinstance(examples, Examples):
        return Examples(examples.store, examples.chosen[np.asarray(indices, dtype=np.int64)])
    return [examples[i] for i in indices]


def _column(
    examples: Sequence[Example], name: str, of_example: Callable[[Example], float], dtype: type[np.generic]
) -> np.ndarray:
    """One number per example: a column of a store, or computed from a list of examples."""
    if isinstance(examples, Examples):
        return examples.column(name).astype(dtype)
    return np.fromiter(map(of_example, examples), dtype, len(examples))


def lengths_of(examples: Sequence[Example]) -> np.ndarray:
    return _column(examples, "count", lambda example: len(example.tokens), np.int64)


def responses_of(examples: Sequence[Example]) -> np.ndarray:
    return _column(examples, "responses", lambda example: example.response_tokens, np.int64)


def groups_of(examples: Sequence[Example]) -> np.ndarray:
    """The number of each example's group; -1: it is alone."""
    return _column(examples, "group", lambda example: example.group, np.int64)


def weight_sums_of(examples: Sequence[Example]) -> np.ndarray:
    """The sum of the weights of each example's response tokens."""
    return _column(examples, "weight_sum", lambda example: example.response_weight, np.float64)


def flat(examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
    """All tokens (int64) and flags, one example after the other."""
    if isinstance(examples, Examples):
        store = examples.store
        return split_flags(store.arrays["tokens"][token_places(examples)], store.vocabulary)
    total = sum(len(example.tokens) for example in examples)
    tokens = np.fromiter(chain.from_iterable(e.tokens for e in examples), dtype=np.int64, count=total)
    return tokens, np.fromiter(chain.from_iterable(e.supervised for e in examples), dtype=np.bool_, count=total)


def has_weights(examples: Sequence[Example]) -> bool:
    if isinstance(examples, Examples):
        weights = examples.store.arrays.get(WEIGHTS)
        return weights is not None and not np.isnan(weights[examples.store.starts[examples.stored]]).all()
    return any(example.weights is not None for example in examples)


def weights_of(examples: Sequence[Example]) -> np.ndarray:
    """The weight of every token (float32), one example after the other."""
    if isinstance(examples, Examples):
        if WEIGHTS not in examples.store.arrays:
            return np.ones(int(lengths_of(examples).sum()), np.float32)
        found = examples.store.arrays[WEIGHTS][token_places(examples)]
        return np.where(np.isnan(found), np.float32(1), found)
    weights = chain.from_iterable([1.0] * len(e.tokens) if e.weights is None else e.weights for e in examples)
    return np.fromiter(weights, np.float32)


def numbers_of(examples: Sequence[Example], name: str, missing: float) -> np.ndarray:
    """Each example's number called `name` (float64); `missing`: the value for examples that have none."""
    if isinstance(examples, Examples):
        column = NUMBER + name
        found = examples.column(column) if column in examples.store.arrays else np.full(len(examples), np.nan)
    else:
        found = np.array([e.numbers.get(name, math.nan) for e in examples], dtype=np.float64)
    return np.where(np.isnan(found), missing, found)


def reference_model_of(examples: Sequence[Example]) -> str:
    """The reference model whose log-probabilities the examples have; empty if they have none."""
    return examples.store.reference_model if isinstance(examples, Examples) else ""


def references_of(examples: Sequence[Example]) -> np.ndarray:
    """log p of each example under the reference model."""
    assert isinstance(examples, Examples) and examples.store.reference is not None
    return examples.store.reference[examples.stored]


def token_references_of(examples: Sequence[Example]) -> np.ndarray:
    """log p of every token under the reference model, one example after the other; 0 where it is not trained."""
    assert isinstance(examples, Examples) and examples.store.reference is not None
    return examples.store.reference[token_places(examples)]


def token_places(examples: Examples) -> np.ndarray:
    """The place in the store of every token, one example after the other."""
    counts, starts = examples.column("count"), examples.store.starts[examples.stored]
    return np.arange(int(counts.sum())) + np.repeat(starts - (np.cumsum(counts) - counts), counts)


def kind_of(examples: Sequence[Example]) -> str | None:
    """The kind of their records; None for a list of examples, which has no kind."""
    return examples.store.kind if isinstance(examples, Examples) else None


def unit_of(examples: Sequence[Example]) -> str:
    """The word for single examples, in the plural: answers, where several of them belong to one row."""
    return "answers" if len(examples) and groups_of(examples[:1])[0] >= 0 else "examples"


def side_of(examples: Sequence[Example], index: int) -> str:
    """`chosen` or `rejected` for an example of pairs, of which the chosen one comes first; empty for other data."""
    if kind_of(examples) != "pairs":
        return ""
    return "rejected" if index and examples[index - 1].group == examples[index].group else "chosen"


def short(digests: np.ndarray) -> np.ndarray:
    """Half of each digest as a number: enough to tell examples apart, and sorted several times as fast as bytes."""
    return np.ascontiguousarray(digests).view("<u8")[::2]


def distinct_tokens(*parts: Sequence[Example]) -> int:
    """How many tokens of the vocabulary occur, counted over whole stores, not over the chosen examples only."""
    found: set[int] = set()
    for part in parts:
        if not isinstance(part, Examples):
            found.update(chain.from_iterable(example.tokens for example in part))
        elif len(part):
            found.update(np.flatnonzero(part.store.arrays["used"]).tolist())
    return len(found)
