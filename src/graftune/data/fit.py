"""Texts -> examples of at most `max_seq_len` tokens, without ever cutting a response to make them fit.

What goes, in this order: whole early turns (the system turn stays; trained turns among them become examples of their
own), then the last question's text from its left, by rendering the shortened message again so that every header of the
template stays whole; and where even an empty question is too long, the prompt's tokens from the left, after BOS.
Cutting the token list from the right, as trainers commonly do, would cut the end token and most of the answer.
An example whose response alone does not fit is dropped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from graftune.batch import Example
from graftune.data import mask
from graftune.data.chat import ChatTurns, Passage
from graftune.data.format import ChatFormat, special_tokens
from graftune.data.record import Message
from graftune.data.row import Refusal
from graftune.data.turns import loss_weight
from graftune.settings.sections import DataConfig
from graftune.tokenizer import Tokenizer

MANY_TURNS, MOST_TURNS = 64, 256  # trained in one conversation that is rendered as a whole, and in one example
# Answers to one question that become examples of their own, each with all that is before it: as beginnings of one text,
# and where the template writes what is before anew for each.
MOST_ALONE, MOST_RENDERED = 512, 256
LONGEST_TAIL = 64  # characters: longer ones are hardly met twice
TURNS, QUESTION, PROMPT = "early turns left out", "question cut from the left", "prompt cut from the left behind BOS"
TOO_LONG = "response longer than max_seq_len"
ACROSS = "a token would span the end of the prompt and the start of the answer: the prompt keeps its inference tokens"


class Built(NamedTuple):
    """An example, the text to continue and the answer expected; how it was shortened; or why it is not used."""

    example: Example | None
    prompt: str
    reference: str
    messages: list[Message]  # what the prompt was rendered from
    truncated: str = ""
    dropped: str = ""
    notes: tuple[str, ...] = ()


class _Piece(NamedTuple):
    """A part of a conversation: an example, or several turns (example: None) that are too long each, whose tokens are
    beginnings of `tokens`, with `ranges` to be trained."""

    passage: Passage
    example: Example | None
    tokens: list[int] = []  # noqa: RUF012 - a named tuple's default, which nothing changes
    ranges: Sequence[tuple[int, int]] = ()
    cut: bool = False  # whether turns before it are left out


class Fitter:
    """Builds the examples of one conversation. Holds what does not change from row to row."""

    def __init__(self, form: ChatFormat, tokenizer: Tokenizer, config: DataConfig):
        self.form, self.tokenizer, self.limit = form, tokenizer, config.longest()
        self.turns = ChatTurns(form, config.prompt_form, form.trained_reasoning(config.train_reasoning)[0])
        self.special = special_tokens(tokenizer)
        self.tails: dict[str, list[int]] = {}  # what stands between a prompt's last control token and its end
        self.question: tuple[str, list[tuple[int, int]]] = ("", [])  # asked last, and where its tokens lie
        self.ends = self._end_ids()

    def _end_ids(self) -> frozenset[int]:
        """The ids that may close a turn; none where the template closes it with ordinary text."""
        if self.form.end_id is None:
            return frozenset()
        calls = [i for i, name in self.special.items() if self.form.call_end and name == self.form.call_end]
        return frozenset({*self.tokenizer.stop_ids, self.form.end_id, *calls})

    def passages(self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int]) -> list[Passage]:
        """The texts of one conversation, not yet tokenised: many of them are encoded at once (`finish`). A very long
        conversation is divided first, so that what is rendered and encoded at a time is about what fits."""
        if len(trained) <= MANY_TURNS:
            return self.turns.passages(messages, tools, trained)
        return [piece.passage._replace(shortened=piece.cut) for piece in self._pieces(messages, tools, trained, 0)]

    def finish(
        self, passage: Passage, tokens: list[int], offsets: Sequence[tuple[int, int]], row: int
    ) -> Iterator[Built]:
        """The examples of a passage whose text was encoded as `tokens`. Those that do not fit are shortened."""
        found = self.ranges(passage, tokens, offsets)
        if found is None:
            for alone in self.turns.alone(passage):
                yield from self.finish(alone, *self.encoded(alone.text), row)
            return
        tokens, ranges, notes = found
        example = self.example(passage, tokens, ranges, row)
        if len(tokens) <= self.limit:
            reason = TURNS if passage.shortened else ""
            yield Built(example, passage.prompt, passage.reference, passage.asked, reason, notes=notes)
        else:
            yield from self._without_early_turns(passage, tokens, ranges, row)

    def encoded(self, text: str) -> tuple[list[int], Any]:
        """Ids, and the characters of those that are asked for: all of a long text's would take longer than encoding."""
        return self.tokenizer.encode_batch([text])[0]

    def build(
        self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int], row: int
    ) -> Iterator[Built]:
        for passage in self.passages(messages, tools, trained):
            yield from self.finish(passage, *self.encoded(passage.text), row)

    def example(self, passage: Passage, tokens: list[int], ranges: Sequence[tuple[int, int]], row: int) -> Example:
        mask.check(tokens, ranges, self.ends)
        weights = mask.spread(len(tokens), ranges, [loss_weight(passage.messages[i]) for i in passage.trained])
        return Example(tokens, mask.flags(len(tokens), ranges), row, weights)

    def ranges(
        self, passage: Passage, tokens: list[int], offsets: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]], tuple[str, ...]] | None:
        """The tokens, the range of each trained turn, and notes. None: a token lies across the border of one of several
        turns, so each of them must become an example of its own."""
        ranges, notes = [], passage.notes
        for prompt, (start, end) in zip(passage.prompts, passage.spans, strict=True):
            first, whole = mask.border(offsets, prompt)
            if not whole and tokens[first] in self.special:
                first, whole = first + 1, True  # a control token that takes the blanks after it (Phi-3's do)
            last, closed = mask.border(offsets, end)
            if not (whole and closed and self._as_inference(passage.text, prompt, tokens, first)):
                if len(passage.spans) > 1:
                    return None
                tokens, answer, first = self._parted(passage, tokens, offsets, first, whole)
                last, notes = len(tokens), (*notes, ACROSS)
                if start > prompt:
                    first += mask.border(answer, start - prompt)[0]
            elif start > prompt:  # reasoning that is not trained: a token with a letter of the answer in it is
                first = max(first, mask.border(offsets, start)[0])
            ranges.append((first, last))
        return tokens, ranges, notes

    def _as_inference(self, text: str, place: int, tokens: list[int], first: int) -> bool:
        """Whether the prompt `text[:place]` has the same tokens here as when it is encoded alone: some vocabularies
        divide blanks by what follows them. Control tokens divide a text, so only the part after the last one counts."""
        before = first - 1
        while before >= 0 and tokens[before] not in self.special:
            before -= 1
        begin = max(0, text.rfind(self.special[tokens[before]], 0, place)) if before >= 0 else 0
        tail = text[begin:place]
        if (known := self.tails.get(tail)) is None:
            known = self.tokenizer.encode(tail)
            if len(tail) <= LONGEST_TAIL:
                self.tails[tail] = known
        return tokens[max(0, before) : first] == known

    def _parted(
        self, passage: Passage, tokens: list[int], offsets: Sequence[tuple[int, int]], first: int, whole: bool
    ) -> tuple[list[int], list[tuple[int, int]], int]:
        """Encode so that the prompt has the tokens that inference gives it: all tokens, the character ranges of the
        answer's tokens, and the number of prompt tokens. `first` is the first token of the whole text that has a
        character of the answer; `whole`: it has no character of the prompt."""
        place = passage.prompts[0]
        prompt = self.tokenizer.encode(passage.text[:place])
        shown = self.tokenizer.decode(tokens)
        rest = [(start - place, end - place) for start, end in offsets[first + (not whole) :]]
        ways = [(tokens[first:], rest)] if whole else [self.tokenizer.encode_with_offsets(passage.text[place:])]
        if not whole:
            # Vocabularies that put a space before every piece: only what lies before the next border is encoded anew.
            piece = self._piece(passage.text[place : offsets[first][1]])
            if piece is not None:
                ways.append(([*piece, *tokens[first + 1 :]], [(0, offsets[first][1] - place)] * len(piece) + rest))
        for answer, places in ways:
            if self.tokenizer.decode([*prompt, *answer]) == shown:
                return [*prompt, *answer], places, len(prompt)
        raise Refusal("prompt and answer share a token", "the tokenizer cannot part them")

    def _piece(self, text: str) -> list[int] | None:
        """Ids of a few characters as SentencePiece models spell them inside a text."""
        known = self.tokenizer.backend.token_to_id
        if (whole := known(text.replace(" ", "\u2581"))) is not None:
            return [whole]
        found: list[int] = []
        for letter in text:
            single = known(letter.replace(" ", "\u2581"))
            parts = [single] if single is not None else [known(f"<0x{byte:02X}>") for byte in letter.encode()]
            if any(part is None for part in parts):
                return None
            found += [part for part in parts if part is not None]
        return found

    def _one(
        self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int], row: int
    ) -> tuple[Passage, Example] | None:
        """The passage and example of turns that the template is known to keep in one text; None if it does not."""
        built = self.turns.together(messages, tools, trained)
        if built is None:
            return None
        found = self.ranges(built, *self.encoded(built.text))
        return (built, self.example(built, *found[:2], row)) if found else None

    def _without_early_turns(
        self, passage: Passage, tokens: list[int], ranges: list[tuple[int, int]], row: int
    ) -> Iterator[Built]:
        messages, trained, pieces = passage.messages, passage.trained, list[_Piece]()
        if not start_turns(messages, user_turns(messages)) and (piece := self._too_long(passage, tokens, ranges)):
            pieces, trained = [piece], trained[: -len(piece.ranges)]
        pieces = [*self._pieces(messages, passage.tools, trained, row, too_long=not pieces), *pieces]
        for piece in pieces:
            found, example, reason = piece.passage, piece.example, TURNS if piece.cut else ""
            if example is None:
                yield from self._cut_each(found, piece.tokens, piece.ranges, row)
            elif len(example.tokens) > self.limit:
                yield self._cut_question(found, example)
            else:
                yield Built(example, found.prompt, found.reference, found.asked, reason, notes=found.notes)

    def _pieces(
        self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int], row: int, too_long: bool = False
    ) -> list[_Piece]:
        """A conversation as examples, in order: from its end, each has as many turns as fit, and what is trained before
        those is for the next. Answers that do not fit even with nothing before their question come as they are.
        `too_long`: whether all of it is known not to fit."""
        users = user_turns(messages)
        made: list[_Piece] = []
        left = len(trained)  # turns that are in no piece yet
        while left:
            last = trained[left - 1]
            start, one = self._longest_end(messages[: last + 1], tools, row, users, whole=bool(made) or not too_long)
            head, fits = _head(messages) if start else 0, len(one[1].tokens) <= self.limit
            first = bisect_right(trained, start, max(0, left - (MOST_TURNS if fits else MOST_ALONE + 1)), left)
            piece = None
            if left - first > 1:
                kept = [i - start + head for i in trained[first:left]]
                ends = [*messages[:head], *messages[start : last + 1]]
                piece = (self._fitting if fits else self._not_fitting)(ends, tools, kept, row)
            alone, most = len(piece.ranges) if piece else 0, MOST_ALONE
            if piece is None:
                question = users[bisect_left(users, last) - 1] if users and users[0] < last else -1
                piece, alone, most = _Piece(*one), left - bisect_right(trained, question, 0, left), MOST_RENDERED
            if alone > most:
                raise Refusal(
                    "too many answers to one question",
                    f"over {most}, of which each would be an example with all the others before it",
                )
            made.append(piece._replace(cut=start > head))
            left -= len(piece.passage.trained)
        return made[::-1]

    def _fitting(
        self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int], row: int
    ) -> _Piece | None:
        """Several turns as one example; None if they are none."""
        several = self._one(messages, tools, trained, row)
        return _Piece(*several) if several and len(several[1].tokens) <= self.limit else None

    def _not_fitting(
        self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int], row: int
    ) -> _Piece | None:
        """The answers to one question that are too long together with what is before them; None if each must be
        rendered alone."""
        passage = self.turns.together(messages, tools, trained)
        found = self.ranges(passage, *self.encoded(passage.text)) if passage else None
        return self._too_long(passage, *found[:2]) if passage and found else None

    def _too_long(self, passage: Passage, tokens: list[int], ranges: list[tuple[int, int]]) -> _Piece | None:
        """The turns of a passage that are too long together with what is before them, like its last one. Their tokens
        are prefixes of the last one's tokens if each turn ends with a control token; None if one does not."""
        if len(ranges) < 2 or any(tokens[last - 1] not in self.special for _, last in ranges):
            return None
        fit = sum(last <= self.limit for _, last in ranges[:-1])
        shown = passage._replace(
            spans=passage.spans[fit:], prompts=passage.prompts[fit:], trained=passage.trained[fit:]
        )
        return _Piece(shown, None, tokens, ranges[fit:])

    def _cut_each(
        self, passage: Passage, tokens: list[int], ranges: Sequence[tuple[int, int]], row: int
    ) -> Iterator[Built]:
        """An example for each trained turn of a passage, too long each; `ranges` are their tokens."""
        for i, span, prompt, place in zip(passage.trained, passage.spans, passage.prompts, ranges, strict=True):
            messages, text = passage.messages[: i + 1], passage.text[: span[1]]
            reference = (messages[-1]["content"] or "").strip()
            one = Passage(text, (span,), (prompt,), messages, (i,), reference, passage.tools, passage.notes)
            yield self._cut_question(one, self.example(one, tokens[: place[1]], [place], row))

    def _longest_end(
        self, messages: list[Message], tools: list[Any] | None, row: int, users: list[int], *, whole: bool
    ) -> tuple[int, tuple[Passage, Example]]:
        """The earliest user turn from which the rest of a conversation fits, with the example of its last turn. The
        search starts at the end with steps that double, so its cost depends on what fits, not on the conversation's
        length. `users`: where user turns are. `whole`: whether the conversation may also stay whole."""
        head, starts = _head(messages), start_turns(messages, users)
        starts = [0, *starts] if whole or not starts else starts

        def last_turn(start: int) -> tuple[Passage, Example]:
            ends = [*messages[: head if start else 0], *messages[start:]]
            found = self._one(ends, tools, [len(ends) - 1], row)
            assert found is not None  # one trained turn is always one text
            return found

        fits, step = len(starts) - 1, 1
        best, worst = last_turn(starts[fits]), -1
        if len(best[1].tokens) > self.limit:
            return starts[fits], best
        while fits - worst > 1:
            place = (fits + worst) // 2 if worst >= 0 else max(0, fits - step)
            found = last_turn(starts[place])
            if len(found[1].tokens) <= self.limit:
                fits, best, step = place, found, 2 * step
            else:
                worst = place
        return starts[fits], best

    def question_offsets(self, question: str) -> list[tuple[int, int]]:
        """Character ranges of a question's tokens. The last question is cached: hundreds of answers may follow it."""
        if question != self.question[0]:
            self.question = question, self.tokenizer.encode_with_offsets(question)[1]
        return self.question[1]

    def _cut_question(self, passage: Passage, example: Example) -> Built:
        """Shortens the last question until the example fits; `passage` trains one turn."""
        response = sum(example.supervised)
        if response >= self.limit:
            return Built(None, "", passage.reference, [], dropped=TOO_LONG)
        messages, turn = passage.messages, passage.trained[-1]
        asked = max(i for i in range(turn) if messages[i]["role"] == "user")
        content = messages[asked]["content"]
        offsets = self.question_offsets(content)
        excess = len(example.tokens) - self.limit
        while excess < len(offsets):
            kept = content[offsets[excess][0] :]
            if not kept.strip():
                break
            shorter = [*messages[:asked], {**messages[asked], "content": kept}, *messages[asked + 1 :]]
            try:
                found = self._one(shorter, passage.tools, (turn,), example.row)
            except Refusal:  # a template that reads the question; the tokens are cut below instead
                break
            assert found is not None
            if len(found[1].tokens) <= self.limit:
                return Built(
                    found[1], found[0].prompt, passage.reference, found[0].asked, QUESTION, notes=passage.notes
                )
            excess += len(found[1].tokens) - self.limit
        return self._cut_tokens(passage, example)

    def _cut_tokens(self, passage: Passage, example: Example) -> Built:
        bos = 1 if example.tokens[0] == self.tokenizer.bos_id and not example.supervised[0] else 0
        keep = self.limit - bos
        if sum(example.supervised) > keep or (bos == 0 and all(example.supervised[-keep:])):
            return Built(None, "", passage.reference, [], dropped=TOO_LONG)
        cut = Example(
            example.tokens[:bos] + example.tokens[-keep:],
            example.supervised[:bos] + example.supervised[-keep:],
            example.row,
            None if example.weights is None else example.weights[:bos] + example.weights[-keep:],
        )
        prompt = self.tokenizer.decode(
            [t for t, trained in zip(cut.tokens, cut.supervised, strict=True) if not trained]
        )
        return Built(cut, prompt, passage.reference, passage.asked, PROMPT, notes=passage.notes)


def _head(messages: list[Message]) -> int:
    """The number of turns that stay when early turns are left out: the system turn."""
    return 1 if messages[0]["role"] == "system" else 0


def user_turns(messages: list[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "user"]


def start_turns(messages: list[Message], users: list[int]) -> list[int]:
    """The user turns at which a shortened conversation may begin."""
    return users[bisect_left(users, _head(messages) + 1) : bisect_left(users, len(messages) - 1)]
