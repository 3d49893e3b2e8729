"""Data -> tokenised examples, with a summary of every row.

`prepare` encodes the data once and finds it again at the next start (cached.py): a data set is a view over a mapped
file (encoded.py), and only a few arrays in memory grow with the number of rows. Records in memory are encoded in the
same way, without a file if only one call needs them. Nothing is left out silently: each row becomes an example, or the
summary counts and the file lists the reason why not. `split` holds out whole source rows, with their exact repeats, so
that neither two turns of one conversation nor two copies of it lie on both sides.
"""

from __future__ import annotations

import dataclasses
import hashlib
import html
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graftune.data import cached
from graftune.data.encoded import Examples, groups_of, short
from graftune.data.kind import ANSWERS, DataKind
from graftune.data.row import Lines, SourceFile
from graftune.data.row_encoder import CHUNK_ROWS, RowEncoder
from graftune.data.source import digest_of, rows, sources
from graftune.data.summary import Summary, counted, nothing_usable
from graftune.data.token_text import as_html
from graftune.data.turns import Message
from graftune.data.writer import StoreWriter
from graftune.errors import GraftuneError
from graftune.io.files import open_plain
from graftune.observe.console import Console
from graftune.settings.sections import DataConfig
from graftune.settings.sources import DataValue, label
from graftune.tokenizer import Tokenizer


class _Texts(Sequence[Any]):
    """One of the texts stored with each example; decoded when it is indexed."""

    def __init__(self, examples: Examples, name: str):
        self.examples, self.name = examples, name

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        text = self.examples.store.text(int(self.examples.stored[place]), self.name)
        if self.name != "messages":
            return text
        return json.loads(text) if text else []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Dataset:
    """Tokenised examples and a summary of every row of the data. Each example also has its texts: the prompt of its
    last trained answer, that answer, and the messages they were rendered from (none for `text` records)."""

    examples: Examples  # each with `tokens` and `supervised`, which says of every token whether it is trained
    summary: Summary  # counts, and the reason for every row that was left out
    sha256: str  # of the data as it was read
    path: str  # empty: records in memory
    tokenizer: Tokenizer | None = field(default=None, compare=False)  # that encoded it

    def __repr__(self) -> str:
        summary = self.summary
        trained = f"{summary.response_tokens} of {summary.tokens} tokens trained"
        return f"Dataset({self.count}, {trained}, longest {self.longest}, {self.path or 'in memory'})"

    def _repr_html_(self) -> str:
        """A notebook shows the first examples, with the trained text marked."""
        shown = "" if self.tokenizer is None else as_html(self.examples[:3], self.tokenizer)
        return f"<div>{html.escape(repr(self))}</div>{shown}"

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def prompts(self) -> Sequence[str]:
        """Each example's prompt: the text before its last trained answer."""
        return _Texts(self.examples, "prompt")

    @property
    def references(self) -> Sequence[str]:
        """Each example's answer in the data to that prompt."""
        return _Texts(self.examples, "reference")

    @property
    def messages(self) -> Sequence[list[Message]]:
        """The messages that each prompt was rendered from."""
        return _Texts(self.examples, "messages")

    @property
    def kind(self) -> str:
        """The kind of its records, such as `answers` or `pairs`."""
        return self.examples.store.kind

    @property
    def longest(self) -> int:
        """Tokens of the longest example; 0 where there is none."""
        return int(self.examples.column("count").max(initial=0))

    @property
    def digest(self) -> str:
        """Digest of all tokens, masks, weights and numbers in order, however stored; part of a run's identity."""
        return hashlib.sha256(self.examples.digests.tobytes()).hexdigest()

    def shared_with(self, other: Dataset) -> int:
        """The number of the other data set's examples that are also in this one, token for token."""
        return int(np.isin(short(other.examples.digests), short(self.examples.digests)).sum())

    def details(self) -> Iterator[tuple[int, str]]:
        """(row, why) for every row of the whole data that was refused or dropped."""
        return self.examples.store.details()

    def subset(self, indices: Sequence[int] | np.ndarray) -> Dataset:
        """These examples with a summary of their own; refused rows are counted in the whole data set only."""
        chosen = self.examples.chosen[np.asarray(indices, dtype=np.int64)]
        part = Examples(self.examples.store, chosen)
        counts = part.column("count")
        summary = Summary(
            rows=len(np.unique(part.column("row"))),
            examples=len(part),
            tokens=int(counts.sum()),
            response_tokens=int(part.column("responses").sum()),
            longest=int(counts.max(initial=0)),
            template=self.summary.template,
            max_seq_len=self.summary.max_seq_len,
        )
        return dataclasses.replace(self, examples=part, summary=summary)

    @property
    def count(self) -> str:
        """How much there is, in words: 400 pairs, or 400 examples."""
        rows = self.leading()
        return counted(len(rows), "example" if rows is self else self.kind.removesuffix("s"))

    def leading(self) -> Dataset:
        """The data set without the later members of groups: of pairs, only the chosen answers stay, whose prompts the
        model is asked."""
        groups = groups_of(self.examples)
        later = (groups >= 0) & (np.diff(groups, prepend=-1) == 0)
        return self.subset(np.flatnonzero(~later)) if later.any() else self

    def at_most(self, count: int, seed: int) -> Dataset:
        """At most `count` examples, chosen by the seed, in the data's order; 0: all of them. Groups are taken whole, as
        many as fit and at least one."""
        if not 0 < count < len(self):
            return self
        groups = groups_of(self.examples)
        alone = groups.max() + 1 + np.arange(len(self))
        units, unit_of, sizes = np.unique(np.where(groups < 0, alone, groups), return_inverse=True, return_counts=True)
        order = np.random.default_rng([seed, 0xE7A1]).permutation(len(units))
        taken = order[: max(1, int((np.cumsum(sizes[order]) <= count).sum()))]
        return self.subset(np.flatnonzero(np.isin(unit_of, taken)))


def prepare(
    value: DataValue | Lines,
    tokenizer: Tokenizer,
    config: DataConfig,
    console: Console | None = None,
    kind: DataKind = ANSWERS,
    *,
    keep: bool = True,
) -> Dataset:
    """Encode everything in the data that can be trained on; GraftuneError if there is nothing. `console` shows the
    progress, and why encoded data cannot be cached. `kind`: how rows are read, as the loss needs them. Without `keep`,
    records in memory are not cached on disk."""
    notes: dict[str, int] = {}  # in the order they come, each once

    def note(text: str) -> None:
        notes.setdefault(text, 0)

    files = sources(value, note)
    path = "" if isinstance(value, Lines) else label(value)
    shown, sha256 = path or "the records", digest_of(files)

    def write(writer: StoreWriter) -> dict[str, Any]:
        encoder, total = RowEncoder(tokenizer, config, shown, kind), _rows_of(files)
        total = total if total > 2 * CHUNK_ROWS else 0  # two chunks are encoded too fast for a bar
        with console.progress(total, label="encoding", unit="rows") if console else nullcontext() as bar:
            for chunk in encoder.chunks(rows(files, config.map, note, kind.refusal_of_all, config.max_unpacked)):
                writer.add(chunk.entries, chunk.details)
                if bar is not None:
                    bar.update(encoder.summary.rows)
        encoder.summary.notes.update(notes)
        if not encoder.summary.examples:
            raise nothing_usable(encoder.summary, shown)
        encoder.summary.duplicates = writer.duplicates()
        return {"summary": encoder.summary.document(), "kind": kind.name}

    if isinstance(value, Lines) and not keep:
        writer = StoreWriter(tokenizer.highest_id + 1)
        store = writer.in_memory(**write(writer))
    else:
        key = cached.key_of([sha256, [file.ending for file in files]], tokenizer, config, kind)
        found = cached.find(key)
        store, why = (found, "") if found is not None else cached.make(key, tokenizer.highest_id + 1, write)
        if why and console is not None:
            console.warn(f"encoded data cannot be kept in {cached.folder()} ({why}): the next start encodes it again")
    summary = store.summary()
    summary.notes = notes | summary.notes
    return Dataset(Examples(store), summary, sha256, path, tokenizer)


def _rows_of(files: Sequence[SourceFile]) -> int:
    """How many rows there are, for a progress bar; 0 where only reading can tell."""
    if any(not file.ending.endswith((".jsonl", ".ndjson")) for file in files):
        return 0
    count = 0
    for one in files:
        if one.records is not None:
            return len(one.records.lines)
        with open_plain(one.path) as file:
            while piece := file.read(1 << 20):
                count += piece.count(b"\n")
    return count


def split(dataset: Dataset, val_split: float, seed: int) -> tuple[Dataset, Dataset]:
    """(train, validation) by source row, in the data's order; the same seed always gives the same rows. Rows that
    repeat each other go to one side together."""
    assert 0 <= val_split < 1, val_split
    if val_split == 0:
        return dataset, dataset.subset([])
    rows, row_of = np.unique(dataset.examples.column("row"), return_inverse=True)
    group_of = _groups(row_of, dataset.examples.digests)
    sizes = np.bincount(group_of)
    if len(sizes) < 2 <= len(rows):  # all rows are the same, so both sides get copies
        group_of, sizes = np.arange(len(rows)), np.ones(len(rows), dtype=np.int64)
    if len(rows) < 2:
        raise GraftuneError(
            f"only {len(rows)} usable row, which cannot be split into training and validation",
            where=dataset.path,
            fix="give more rows, a file of their own with eval_data, or val_split 0",
        )
    count = min(len(rows) - 1, max(1, round(len(rows) * val_split)))
    order = np.random.default_rng([seed, 0x5917]).permutation(len(rows))
    held = _held(order, group_of, sizes, count)
    side = held[group_of][row_of]
    return dataset.subset(np.flatnonzero(~side)), dataset.subset(np.flatnonzero(side))


def _held(order: np.ndarray, group_of: np.ndarray, sizes: np.ndarray, count: int) -> np.ndarray:
    """Which groups are held out: the first ones of `order` that have at most `count` rows together, at least one."""
    held = np.zeros(len(sizes), dtype=np.bool_)
    left, seen = count, set()
    for group in group_of[order].tolist():
        if group not in seen and sizes[group] <= left:
            held[group] = True
            left -= int(sizes[group])
        seen.add(group)
        if not left:
            break
    if not held.any():
        held[int(sizes.argmin())] = True
    return held


def _groups(row_of: np.ndarray, digests: np.ndarray) -> np.ndarray:
    """The number of each row's group. Rows that share an example are in one group; a row without repeats is alone."""
    kinds, kind_of = np.unique(short(digests), return_inverse=True)
    count = int(row_of.max(initial=-1)) + 1
    group = np.arange(count)
    while True:  # each pass carries the least number from a row to those that share an example with it
        least = np.full(len(kinds), count)
        np.minimum.at(least, kind_of, group[row_of])
        following = group.copy()
        np.minimum.at(following, row_of, least[kind_of])
        if np.array_equal(following, group):
            return np.unique(group, return_inverse=True)[1]
        group = following
