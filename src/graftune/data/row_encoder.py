"""Rows -> examples, a chunk at a time; every row is counted as used, or by the reason why it is not.

A chunk's rows become texts (`Fitter.passages`), all texts are encoded in one call that uses every core, and the tokens
become examples (`Fitter.finish`); only what does not fit is rendered and encoded again, one by one. While one chunk is
encoded, by threads of the tokenizer library that need no interpreter, the next one is rendered. Rejected: worker
processes, which would each need the tokenizer and pay to send rows and tokens between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from graftune.batch import Example
from graftune.data.chat import Passage
from graftune.data.fit import Built, Fitter
from graftune.data.format import check_roles, special_pattern, special_tokens
from graftune.data.kind import ANSWERS, DataKind
from graftune.data.record import Record, trained_turns
from graftune.data.row import Refusal, Row
from graftune.data.shared_prompt import INCOMPLETE, SEVERAL, fit_together
from graftune.data.summary import KEPT_DETAILS, Summary, counted
from graftune.data.template import usable_format
from graftune.data.turns import as_unicode
from graftune.data.writer import NewExample
from graftune.errors import GraftuneError
from graftune.io.json_file import no_collections
from graftune.settings.sections import DataConfig
from graftune.tokenizer import Tokenizer

CHUNK_ROWS = 1024
CHUNK_CHARS = 1 << 21  # a chunk ends early after so many: memory must not grow with the rows' length
Encoded = list[tuple[list[int], Any]]


@dataclass
class Pending:
    """A row between rendering and encoding: its texts, or why it is not used."""

    row: Row
    refusal: Refusal | None = None
    kind: str = ""  # of its records
    passages: list[Passage] = field(default_factory=list)  # whose texts are `texts`; none: it is a `text` record
    texts: list[str] = field(default_factory=list)
    weight: float = 1.0  # of a `text` record's loss
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass
class Chunk:
    entries: list[NewExample] = field(default_factory=list)
    details: list[tuple[int, str]] = field(default_factory=list)


class RowEncoder:
    """Encodes rows and keeps the summary. The model's own template is opened when the first row needs it."""

    def __init__(self, tokenizer: Tokenizer, config: DataConfig, path: str, kind: DataKind = ANSWERS):
        self.tokenizer, self.config, self.path, self.kind = tokenizer, config, path, kind
        self.summary = Summary(max_seq_len=config.longest())
        self.control = special_pattern(tokenizer)
        # A search for any of hundreds of names is slow; almost no text has even their first letters.
        self.openings = {name[0] for name in special_tokens(tokenizer).values() if name}
        self.fitter: Fitter | None = None
        self.row: Row | None = None  # that is being rendered or counted
        if config.template != "auto":  # a missing template file is an error for every kind of rows
            self._open()

    def chunks(self, rows: Iterable[Row]) -> Iterator[Chunk]:
        """Every row's examples, in order. Ctrl-C and other signals are raised with a note that names the row."""
        try:
            yield from self._chunks(rows)
        except BaseException as error:
            if not isinstance(error, Exception) and self.row is not None:
                error.add_note(f"while encoding {self.path}, {self.row.place}")
            raise

    def _chunks(self, rows: Iterable[Row]) -> Iterator[Chunk]:
        with no_collections(), ThreadPoolExecutor(1, thread_name_prefix="graftune-encode") as worker:
            before: tuple[list[Pending], Future[Encoded]] | None = None
            for pending in self._pending(rows):
                texts = [text for one in pending for text in one.texts]
                coming = worker.submit(self.tokenizer.encode_batch, texts)
                if before is not None:
                    yield self._chunk(*before)
                before = pending, coming
            if before is not None:
                yield self._chunk(*before)

    def _pending(self, rows: Iterable[Row]) -> Iterator[list[Pending]]:
        held: list[Pending] = []
        size = 0
        for row in rows:
            held.append(self._rendered(row))
            size += sum(map(len, held[-1].texts))
            if len(held) >= CHUNK_ROWS or size >= CHUNK_CHARS:
                yield held
                held, size = [], 0
        if held:
            yield held

    def _rendered(self, row: Row) -> Pending:
        self.row = row
        try:
            if isinstance(row.value, Refusal):
                raise row.value
            records, numbers = self.kind.records(row.value), self.kind.numbers_of(row.value)
            if self.kind.members not in (0, len(records)):
                what = f"{len(records)} records where {self.kind.name} have {self.kind.members}"
                raise Refusal(INCOMPLETE, what)
            for note in dict.fromkeys(note for record in records for note in record.notes):
                self._note(note)
            first = records[0]
            if first.kind == "text":
                self._note_control([first.text])
                return Pending(row, kind="text", texts=[first.text], weight=first.weight, numbers=numbers)
            passages = [passage for record in records for passage in self._passages(record)]
            # A template may print text of any field of the row.
            texts = [as_unicode(passage.text) for passage in passages]
            return Pending(row, kind=first.kind, passages=passages, texts=texts, numbers=numbers)
        except Refusal as refusal:
            return Pending(row, _without_frames(refusal))

    def _passages(self, record: Record) -> list[Passage]:
        fitter, messages = self._fitter(record), record.messages
        form = fitter.form
        trained = trained_turns(record, "assistant" if self.kind.members else self.config.train_on)
        if not form.takes_system and messages[0]["role"] == "system":
            self._note("system turns merged into the first user turn: the template takes none")
        check_roles(form, messages, record.tools)
        if left := len(messages) - 1 - trained[-1]:
            self._note(f"{counted(left, 'turn')} after the last trained answer left out")
        if record.tools and not form.renders_tools:
            self._note("tools given that the template does not render")
        self._note_control([message["content"] or "" for message in messages])
        passages = fitter.passages(messages, record.tools, trained)
        if self.kind.members and len(passages) > 1:
            raise Refusal(INCOMPLETE, SEVERAL)
        return passages

    def _chunk(self, pending: list[Pending], coming: Future[Encoded]) -> Chunk:
        chunk, encoded, done = Chunk(), coming.result(), 0
        for one in pending:
            count = len(one.texts)
            self._account(one, encoded[done : done + count], chunk)
            done += count
        return chunk

    def _account(self, one: Pending, encoded: Encoded, chunk: Chunk) -> None:
        summary, row = self.summary, one.row
        summary.rows += 1
        self.row = row
        try:
            if one.refusal is not None:
                raise one.refusal
            made = self._built(one, encoded)
        except Refusal as refusal:
            _without_frames(refusal)
            if self.config.strict:
                raise GraftuneError(
                    refusal.text,
                    where=row.place if row.file else f"{self.path}, {row.place}",
                    fix="fix the row, or leave out strict",
                ) from None
            summary.refused[refusal.reason] += 1
            self._detail(chunk, row, refusal.text)
            return
        summary.kinds[one.kind] += 1
        # A long text loses nothing, so the lengths of its windows are counted.
        whole = (
            [tokens for tokens, _ in encoded] if one.passages else [one.example.tokens for one in made if one.example]
        )
        for length in map(len, whole):
            summary.lengths[length] += 1
        for built in made:
            self._count(built, one, chunk)
        for note in dict.fromkeys(note for built in made for note in built.notes):
            self._note(note)

    def _built(self, one: Pending, encoded: Encoded) -> list[Built]:
        """The row's examples, with its key and numbers; if they form a group, all of them or a Refusal."""
        if not one.passages:
            ((tokens, _),) = encoded
            made = list(windows(one.texts[0], tokens, self.tokenizer, self.config.longest(), one.weight))
            several = "texts longer than max_seq_len, divided into several examples"
        else:
            assert self.fitter is not None
            if self.kind.members:
                made = fit_together(self.fitter, one.passages, encoded)
            else:
                pairs = zip(one.passages, encoded, strict=True)
                made = [built for passage, given in pairs for built in self.fitter.finish(passage, *given)]
            several = "conversations divided into several examples"
        if len(made) > max(1, self.kind.members):
            self._note(several)
        group = one.row.key if self.kind.members > 1 else -1
        return [_placed(built, one.row.key, group, one.numbers) for built in made]

    def _count(self, built: Built, one: Pending, chunk: Chunk) -> None:
        summary, example = self.summary, built.example
        if built.dropped:
            summary.dropped[built.dropped] += 1
            self._detail(chunk, one.row, built.dropped)
        if built.truncated:
            summary.truncated[built.truncated] += 1
        if example is not None:
            size, times = len(example.tokens), one.row.times
            summary.examples += times
            summary.tokens += size * times
            summary.response_tokens += example.response_tokens * times
            summary.longest = max(summary.longest, size)
            chunk.entries.append(NewExample(example, built.prompt, built.reference, built.messages, times))

    def _detail(self, chunk: Chunk, row: Row, why: str) -> None:
        detail = (row.number, f"{why} (in {row.file})" if row.file else why)
        chunk.details.append(detail)
        self.summary.left_out += 1
        if len(self.summary.details) < KEPT_DETAILS:
            self.summary.details.append(detail)

    def _fitter(self, record: Record) -> Fitter:
        """One format serves the whole file: the template chosen, the model's own, or plain where it has none."""
        chat = record.kind in ("messages", "conversations")
        own = self.tokenizer.template or self.tokenizer.template_fault
        if chat and self.config.template == "auto" and own is None:
            raise GraftuneError(
                "this is chat data, and the model has no chat template",
                where=self.path,
                fix="give a Jinja file with `template: FILE`, or `template: none` for plain text",
            )
        return self.fitter or self._open()

    def _open(self) -> Fitter:
        form = usable_format(self.tokenizer, self.config)
        self.summary.template = form.name
        notes = (*form.notes, form.trained_reasoning(self.config.train_reasoning)[1])
        self.summary.notes.update(dict.fromkeys(filter(None, notes), 0))
        self.fitter = Fitter(form, self.tokenizer, self.config)
        return self.fitter

    def _note_control(self, texts: list[str]) -> None:
        """Counts rows whose text spells a control token. Other trainers parse it as one too; the mask stays correct."""
        if self.control is None:
            return
        for text in texts:
            for letter in self.openings:
                if letter in text:
                    if self.control.search(text):
                        self._note("rows whose text spells a control token of the model")
                        return
                    break

    def _note(self, text: str) -> None:
        self.summary.notes[text] += 1


def windows(text: str, tokens: list[int], tokenizer: Tokenizer, limit: int, weight: float = 1.0) -> Iterator[Built]:
    """Plain text, every token trained, BOS as the tokenizer says and EOS always. Too long: several windows.

    Each later window starts with BOS, or else with the last token of the window before it, so that every token is
    predicted once. Only the first one has a prompt: a sample answer continues the beginning of a text.
    """
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    if tokenizer.eos_id is None:
        raise Refusal("no EOS token", "the tokenizer names none to end a text with")
    whole = [*([] if bos is None else [bos]), *tokens, tokenizer.eos_id]
    end = _quarter(text)
    prompt = ((tokenizer.bos_token or "") if bos is not None else "") + text[:end]
    first = min(limit, len(whole))
    yield Built(_trained(whole[:first], weight), prompt, text[end:].strip(), [])
    for start in range(first, len(whole), limit - 1):
        head = whole[start - 1] if bos is None else bos
        window = [head, *whole[start : start + limit - 1]]
        yield Built(_trained(window, weight), "", "", [])


def _trained(tokens: list[int], weight: float) -> Example:
    return Example(tokens, [True] * len(tokens), weights=None if weight == 1 else [weight] * len(tokens))


def _quarter(text: str) -> int:
    """The length of about a quarter of a text, up to the end of a word: the prompt of a sample answer."""
    space = text.find(" ", max(1, len(text) // 4))
    return space if space > 0 else max(1, len(text) // 4)


def _placed(built: Built, row: int, group: int, numbers: dict[str, float]) -> Built:
    """Adds the row's key, group and numbers to its example, and whether it was shortened."""
    if built.example is None:
        return built
    shortened = bool(built.truncated)
    return built._replace(
        example=dataclasses.replace(built.example, row=row, group=group, numbers=numbers, shortened=shortened)
    )


def _without_frames(refusal: Refusal) -> Refusal:
    """Drop the traceback, whose frames keep the row and all that was made of it alive: the cycle collector is paused
    while rows are read."""
    refusal.__context__ = None
    return refusal.with_traceback(None)
