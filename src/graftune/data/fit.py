"""Texts -> examples of at most `max_seq_len` tokens, without ever losing a response to make room.

What goes, in this order: whole early turns (the system turn stays; trained turns among them become examples of their
own), then the last question's text from its left, by rendering the shortened message again so that every header of the
template stays whole; and where even an empty question leaves no room, the prompt's tokens from the left behind BOS.
Cutting the token list from the right, as trainers commonly do, would cut the end token and most of the answer.
An example whose response alone does not fit is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from graftune.batch import Example
from graftune.data import mask
from graftune.data.chat import Passage, passages
from graftune.data.record import Message
from graftune.data.source import Refusal
from graftune.data.template import ChatFormat, special_tokens
from graftune.tokenizer import Tokenizer

TURNS, QUESTION, PROMPT = "early turns left out", "question cut from the left", "prompt cut from the left behind BOS"
TOO_LONG = "response longer than max_seq_len"


@dataclass(frozen=True)
class Built:
    """An example, the text to continue and the answer expected; how it was shortened; or why it is not used."""

    example: Example | None
    prompt: str
    reference: str
    messages: list[Message] = field(default_factory=list)  # what the prompt was rendered from
    truncated: str = ""
    dropped: str = ""


class Fitter:
    """Builds the examples of one conversation. Holds what does not change from row to row."""

    def __init__(self, form: ChatFormat, tokenizer: Tokenizer, max_seq_len: int):
        self.form, self.tokenizer, self.limit = form, tokenizer, max_seq_len
        allowed = {*tokenizer.stop_ids, form.end_id} if form.end_id is not None else set()
        self.special = special_tokens(tokenizer).keys()
        self.ends = frozenset(i for i in allowed if i is not None)

    def passages(self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int]) -> list[Passage]:
        """The texts of one conversation, not yet tokenised: many of them are encoded at once (`finish`)."""
        return passages(self.form, self.tokenizer, messages, tools, trained)

    def finish(
        self, passage: Passage, tokens: list[int], offsets: Sequence[tuple[int, int]], row: int
    ) -> Iterator[Built]:
        """The examples of a passage whose text was encoded as `tokens`; what does not fit is shortened one by one."""
        example = self._masked(passage, tokens, offsets, row)
        if len(example.tokens) <= self.limit:
            yield Built(example, passage.prompt, passage.reference, passage.asked)
        else:
            yield from self._without_early_turns(passage, passage.tools, row)

    def build(
        self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int], row: int
    ) -> Iterator[Built]:
        for passage in self.passages(messages, tools, trained):
            yield from self.finish(passage, *self.tokenizer.encode_with_offsets(passage.text), row)

    def _tokenised(self, passage: Passage, row: int) -> Example:
        return self._masked(passage, *self.tokenizer.encode_with_offsets(passage.text), row)

    def _masked(self, passage: Passage, tokens: list[int], offsets: Sequence[tuple[int, int]], row: int) -> Example:
        exact = mask.exact_ranges(offsets, passage.spans)
        if exact is not None:
            mask.check(tokens, None, passage.spans, exact, self.ends)
            return Example(tokens, mask.flags(len(tokens), exact), row)
        ranges = mask.token_ranges(offsets, passage.spans)
        cuts = [
            start
            for (start, _), (first, last) in zip(passage.spans, ranges, strict=True)
            if first < last and offsets[first][0] < start
        ]
        if cuts:
            tokens, offsets = self._divided(passage.text, cuts, tokens, offsets)
            ranges = mask.token_ranges(offsets, passage.spans)
            # A control token that swallows the blanks behind it (Phi-3's do) still belongs to the prompt.
            ranges = [
                (first + (offsets[first][0] < start and tokens[first] in self.special), last)
                for (start, _), (first, last) in zip(passage.spans, ranges, strict=True)
            ]
        mask.check(tokens, offsets, passage.spans, ranges, self.ends)
        return Example(tokens, mask.flags(len(tokens), ranges), row)

    def _divided(
        self, text: str, cuts: list[int], tokens: list[int], offsets: Sequence[tuple[int, int]]
    ) -> tuple[list[int], Sequence[tuple[int, int]]]:
        """Tokens that stop at `cuts`, where a prompt's last characters went into one token with the answer's first.

        Inference tokenises the prompt alone, so the answer has to start with a token of its own. Vocabularies that
        put a space before every piece cannot be divided so; there the token that covers both counts as trained.
        """
        parts = [
            (first, *self.tokenizer.encode_with_offsets(text[first:last]))
            for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True)
        ]
        divided = [token for _, ids, _ in parts for token in ids]
        if self.tokenizer.decode(divided) != self.tokenizer.decode(tokens):
            return tokens, offsets
        return divided, [(first + start, first + end) for first, _, pairs in parts for start, end in pairs]

    def _one(
        self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int], row: int
    ) -> tuple[Passage, Example] | None:
        """The passage and example of turns that the template is known to keep in one text; None if it does not."""
        built = passages(self.form, self.tokenizer, messages, tools, trained)
        return (built[0], self._tokenised(built[0], row)) if len(built) == 1 else None

    def _without_early_turns(self, passage: Passage, tools: list[Any] | None, row: int) -> Iterator[Built]:
        messages, trained = passage.messages, passage.trained
        head = 1 if messages[0]["role"] == "system" else 0
        # A conversation may start again at any later user turn up to the last one before the last trained turn.
        starts = [i for i in range(head + 1, trained[-1]) if messages[i]["role"] == "user"]
        low, high, best = 0, len(starts), None
        while low < high:  # the first start that leaves few enough tokens
            middle = (low + high) // 2
            start = starts[middle]
            kept = [i for i in trained if i > start]
            found = self._one([*messages[:head], *messages[start:]], tools, [i - start + head for i in kept], row)
            if found is not None and len(found[1].tokens) <= self.limit:
                best, high = (start, *found), middle
            else:
                low = middle + 1
        if best is None:
            start = starts[-1] if starts else head
            last = self._one([*messages[:head], *messages[start:]], tools, [trained[-1] - start + head], row)
            assert last is not None  # one trained turn is always one text
            if trained[:-1]:
                yield from self.build(messages, tools, trained[:-1], row)
            yield self._cut_question(*last, tools, row)
        else:
            start, shorter, example = best
            rest = [i for i in trained if i < start]
            if rest:
                yield from self.build(messages, tools, rest, row)
            yield Built(example, shorter.prompt, shorter.reference, shorter.asked, truncated=TURNS)

    def _cut_question(self, passage: Passage, example: Example, tools: list[Any] | None, row: int) -> Built:
        """Shortens the last question until the example fits; `passage` trains one turn."""
        response = sum(example.supervised)
        if response >= self.limit:
            return Built(None, passage.prompt, passage.reference, passage.asked, dropped=TOO_LONG)
        messages, turn = passage.messages, passage.trained[-1]
        asked = max(i for i in range(turn) if messages[i]["role"] == "user")
        content = messages[asked]["content"]
        _, offsets = self.tokenizer.encode_with_offsets(content)
        excess = len(example.tokens) - self.limit
        while excess < len(offsets):
            kept = content[offsets[excess][0] :]
            if not kept.strip():
                break
            shorter = [*messages[:asked], {**messages[asked], "content": kept}, *messages[asked + 1 :]]
            try:
                found = self._one(shorter, tools, (turn,), row)
            except Refusal:  # a template that reads the question; the tokens are cut below instead
                break
            assert found is not None
            if len(found[1].tokens) <= self.limit:
                return Built(found[1], found[0].prompt, passage.reference, found[0].asked, truncated=QUESTION)
            excess += len(found[1].tokens) - self.limit
        return self._cut_tokens(passage, example)

    def _cut_tokens(self, passage: Passage, example: Example) -> Built:
        bos = 1 if example.tokens[0] == self.tokenizer.bos_id and not example.supervised[0] else 0
        keep = self.limit - bos
        if sum(example.supervised) > keep or (bos == 0 and all(example.supervised[-keep:])):
            return Built(None, passage.prompt, passage.reference, passage.asked, dropped=TOO_LONG)
        cut = Example(
            example.tokens[:bos] + example.tokens[-keep:],
            example.supervised[:bos] + example.supervised[-keep:],
            example.row,
        )
        prompt = self.tokenizer.decode(
            [t for t, trained in zip(cut.tokens, cut.supervised, strict=True) if not trained]
        )
        return Built(cut, prompt, passage.reference, passage.asked, truncated=PROMPT)
