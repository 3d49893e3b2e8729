"""A data file -> tokenised examples, with an account of every row.

`prepare` walks the file once: row -> record -> conversation -> text with trained spans -> tokens with a mask. Nothing
is left out silently: each row ends as an example, or under a reason that the summary counts and lists with the row's
number. `split` holds out whole source rows, so that two turns of one conversation never lie on both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graftune.batch import Example
from graftune.config import DataConfig
from graftune.data.chat import check_roles, trained_turns
from graftune.data.fit import Built, Fitter, build_text
from graftune.data.record import Message, Record, to_record
from graftune.data.source import Refusal, Row, digest_of, rows, sources
from graftune.data.template import chat_format, plain_format, special_pattern
from graftune.errors import GraftuneError
from graftune.mixture import DataValue, label
from graftune.tokenizer import Tokenizer


@dataclass
class Summary:
    """What became of the file. `refused` rows were bad, `dropped` examples too long, `truncated` ones made to fit."""

    kinds: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    examples: int = 0
    tokens: int = 0
    response_tokens: int = 0
    longest: int = 0
    truncated: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    details: list[tuple[int, str]] = field(default_factory=list)  # (row, why) for each row refused or dropped
    notes: dict[str, int] = field(default_factory=dict)  # what a user should know, and for how many rows
    template: str = ""

    @property
    def supervised_share(self) -> float:
        """Trained tokens among all of them."""
        return self.response_tokens / self.tokens if self.tokens else 0.0


@dataclass
class Dataset:
    """Examples and, index by index, what sample answers need: the text to continue for the example's last trained
    answer, that answer, and the messages the text was rendered from (none for `text` records)."""

    examples: list[Example]
    prompts: list[str]
    references: list[str]
    messages: list[list[Message]]
    summary: Summary
    sha256: str
    path: str

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def records(self) -> list[dict[str, Any]]:
        """Each example's prompt messages and reference answer."""
        pairs = zip(self.messages, self.references, strict=True)
        return [{"messages": messages, "reference": reference} for messages, reference in pairs]

    def subset(self, indices: Sequence[int]) -> Dataset:
        """These examples with figures of their own; the account of refused rows stays with the whole."""
        examples = [self.examples[i] for i in indices]
        summary = Summary(rows=len({e.row for e in examples}), template=self.summary.template)
        for example in examples:
            _count(summary, example)
        return Dataset(
            examples,
            [self.prompts[i] for i in indices],
            [self.references[i] for i in indices],
            [self.messages[i] for i in indices],
            summary,
            self.sha256,
            self.path,
        )


def prepare(value: DataValue, tokenizer: Tokenizer, config: DataConfig) -> Dataset:
    """Everything in the data that can be trained on; GraftuneError if that is nothing."""
    notes: list[str] = []
    files, path = sources(value, notes.append), label(value)
    maker = _Maker(tokenizer, config, path)
    data = Dataset([], [], [], [], maker.summary, digest_of(files), path)
    for row in rows(files, note=notes.append):
        for built in maker.examples(row):
            for _ in range(row.times if built.example is not None else 0):
                assert built.example is not None
                data.examples.append(built.example)
                data.prompts.append(built.prompt)
                data.references.append(built.reference)
                data.messages.append(built.messages)
    maker.summary.notes.update(dict.fromkeys(notes, 0))
    if not data.examples:
        raise _nothing(maker.summary, path)
    return data


def split(dataset: Dataset, val_split: float, seed: int) -> tuple[Dataset, Dataset]:
    """(train, validation) by source row, in the file's order; the same seed always gives the same rows."""
    assert 0 <= val_split < 1, val_split
    rows = sorted({example.row for example in dataset.examples})
    if val_split == 0:
        return dataset, dataset.subset([])
    if len(rows) < 2:
        raise GraftuneError(
            f"only {len(rows)} usable row, which cannot be split into training and validation",
            where=dataset.path,
            mend="give more rows, a file of their own with eval_data, or val_split 0",
        )
    count = min(len(rows) - 1, max(1, round(len(rows) * val_split)))
    order = np.random.default_rng([seed, 0x5917]).permutation(len(rows))
    held = {rows[i] for i in order[:count]}
    sides: tuple[list[int], list[int]] = ([], [])
    for index, example in enumerate(dataset.examples):
        sides[example.row in held].append(index)
    return dataset.subset(sides[0]), dataset.subset(sides[1])


class _Maker:
    """Rows -> examples, keeping the summary. The model's own template is looked at when the first row needs it."""

    def __init__(self, tokenizer: Tokenizer, config: DataConfig, path: str):
        self.tokenizer, self.config, self.path = tokenizer, config, path
        self.summary = Summary()
        self.control = special_pattern(tokenizer)
        self.fitter: Fitter | None = None
        if config.template != "auto":  # a file that is not there is a mistake whatever the rows are
            self._open()

    def examples(self, row: Row) -> Iterator[Built]:
        self.summary.rows += 1
        try:
            if isinstance(row.value, Refusal):
                raise row.value
            record = to_record(row.value)
            built = list(self._of(record, row.key))
        except Refusal as refusal:
            if self.config.strict:
                raise GraftuneError(
                    refusal.text,
                    where=row.place if row.file else f"{self.path}, {row.place}",
                    mend="fix the row, or leave out strict",
                ) from None
            self._bump(self.summary.refused, refusal.reason)
            self.summary.details.append((row.key, refusal.text if not row.file else f"{row.place}: {refusal.text}"))
            return
        self._bump(self.summary.kinds, record.kind)
        for one in built:
            if one.dropped:
                self._bump(self.summary.dropped, one.dropped)
                self.summary.details.append((row.number, one.dropped))
            if one.truncated:
                self._bump(self.summary.truncated, one.truncated)
            if one.example is not None:
                _count(self.summary, one.example)
        yield from built

    def _of(self, record: Record, row: int) -> Iterator[Built]:
        for name in record.ignored:
            self._note(f"column not used: {name}")
        for note in record.notes:
            self._note(note)
        if record.kind == "text":
            self._note_control([record.text])
            windows = build_text(record.text, self.tokenizer, self.config.longest(), row)
            if len(windows) > 1:
                self._note("texts longer than max_seq_len, divided into several examples")
            yield from windows
            return
        fitter, messages = self._fitter(record), record.messages
        form = fitter.form
        trained = trained_turns(record, self.config.train_on)
        if record.flagged and self.config.train_on != "flagged":
            self._note(f'"train"/"weight" flags not used, since train_on is {self.config.train_on}')
        if not form.takes_system and messages[0]["role"] == "system":
            self._note("system turns merged into the first user turn: the template takes none")
        check_roles(form, record, messages)
        if record.tools and form.render(messages, record.tools) == form.render(messages, None):
            self._note("tools given that the template does not render")
        self._note_control([message["content"] or "" for message in messages])
        built = list(fitter.build(messages, record.tools, trained, row))
        if len(built) > 1:
            self._note("conversations divided into several examples")
        yield from built

    def _fitter(self, record: Record) -> Fitter:
        """One format serves the whole file: the template chosen, the model's own, or plain where it has none."""
        chat = record.kind in ("messages", "conversations")
        if chat and self.config.template == "auto" and self.tokenizer.template is None:
            raise GraftuneError(
                "this is chat data, and the model has no chat template",
                where=self.path,
                mend="give a Jinja file with `template: FILE`, or `template: none` for plain text",
            )
        return self.fitter or self._open()

    def _open(self) -> Fitter:
        form = chat_format(self.tokenizer, self.config) or plain_format(self.tokenizer)
        self.summary.template = form.name
        self.summary.notes.update(dict.fromkeys(form.notes, 0))
        self.fitter = Fitter(form, self.tokenizer, self.config.longest())
        return self.fitter

    def _note_control(self, texts: Sequence[str]) -> None:
        """Control tokens written in the data are parsed as such, as every other trainer does; the mask holds."""
        if self.control is not None and any(self.control.search(text) for text in texts):
            self._note("rows whose text spells a control token of the model")

    def _note(self, text: str) -> None:
        self._bump(self.summary.notes, text)

    @staticmethod
    def _bump(counts: dict[str, int], key: str) -> None:
        counts[key] = counts.get(key, 0) + 1


def _count(summary: Summary, example: Example) -> None:
    summary.examples += 1
    summary.tokens += len(example.tokens)
    summary.response_tokens += example.response_tokens
    summary.longest = max(summary.longest, len(example.tokens))


def _nothing(summary: Summary, path: str) -> GraftuneError:
    if not summary.rows:
        return GraftuneError("holds no rows", where=path, mend="give a file with at least one record")
    counts = Counter(summary.refused) + Counter(summary.dropped)
    (reason, count), *_ = counts.most_common(1)
    row, why = next((row, why) for row, why in summary.details if why.startswith(reason))
    return GraftuneError(
        f"none of the {summary.rows} rows can be used ({count} for: {reason}; row {row}: {why})",
        where=path,
        mend="mend the data or the settings that refuse it",
    )
