"""Character spans -> a trained/not-trained flag per token, and checks of the resulting mask.

The whole text is tokenised once, so tokens are the ones inference would see, and no control token is ever broken.
Borders of prompts and answers have to lie between two tokens: `border` finds the token that begins there, or the one
that lies across it. (Tokenising prompt and response apart would make the boundary trivial, but SentencePiece models put
a space before each piece.) The answer is encoded separately only if a token lies across a border, or if the prompt
would not have the tokens that it has at inference. Then `check` verifies for every template that each span has tokens,
that the last of them is the end token, and that what follows it is not trained.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from graftune.batch import Example
from graftune.data.chat import Passage
from graftune.data.format import ChatFormat, special_tokens
from graftune.data.row import Refusal
from graftune.data.turns import loss_weight
from graftune.tokenizer import Tokenizer
from graftune.tokenizer.offsets import Offsets

LONGEST_TAIL = 64  # characters: longer tails hardly occur twice, so they are not cached
ACROSS = "a token would span the end of the prompt and the start of the answer: the prompt keeps its inference tokens"


class Masked(NamedTuple):
    """A passage as an example. `ranges`: the tokens of each trained turn."""

    passage: Passage
    example: Example
    ranges: Sequence[tuple[int, int]]

    @property
    def size(self) -> int:
        return len(self.example.tokens)


class Masker:
    """Masks the passages of one template and tokenizer."""

    def __init__(self, form: ChatFormat, tokenizer: Tokenizer):
        self.tokenizer, self.special = tokenizer, special_tokens(tokenizer)
        self.tails: dict[str, list[int]] = {}  # text from a prompt's last control token to its end -> ids
        self.ends = self._end_ids(form)

    def _end_ids(self, form: ChatFormat) -> frozenset[int]:
        """The ids that may close a turn; none where the template closes it with ordinary text."""
        if form.end_id is None:
            return frozenset()
        calls = [i for i, name in self.special.items() if form.call_end and name == form.call_end]
        return frozenset({*self.tokenizer.stop_ids, form.end_id, *calls})

    def masked(self, passage: Passage, tokens: list[int], offsets: Sequence[tuple[int, int]]) -> Masked | None:
        """The passage, whose text was encoded as `tokens`, as an example. None: a token lies across the border of one
        of several turns, so each of them must become an example of its own."""
        ranges = []
        for turn in passage.turns:
            first, whole = border(offsets, turn.prompt)
            if not whole and tokens[first] in self.special:
                first, whole = first + 1, True  # a control token that takes the blanks after it (Phi-3's do)
            last, closed = border(offsets, turn.end)
            if not (whole and closed and self._as_inference(passage.text, turn.prompt, tokens, first)):
                if len(passage.turns) > 1:
                    return None
                tokens, answer, first = self._parted(passage, tokens, offsets, first, whole)
                last, passage = len(tokens), passage._replace(notes=(*passage.notes, ACROSS))
                if turn.start > turn.prompt:
                    first += border(answer, turn.start - turn.prompt)[0]
            elif turn.start > turn.prompt:  # untrained reasoning: a token with a letter of the answer in it is trained
                first = max(first, border(offsets, turn.start)[0])
            ranges.append((first, last))
        return Masked(passage, self.example(passage, tokens, ranges), ranges)

    def example(self, passage: Passage, tokens: list[int], ranges: Sequence[tuple[int, int]]) -> Example:
        check(tokens, ranges, self.ends)
        weights = spread(len(tokens), ranges, [loss_weight(passage.messages[i]) for i in passage.trained])
        return Example(tokens, flags(len(tokens), ranges), weights=weights)

    def _as_inference(self, text: str, place: int, tokens: list[int], first: int) -> bool:
        """Whether the prompt `text[:place]` has the same tokens here as when it is encoded alone: some vocabularies
        divide blanks by what follows them. Control tokens divide a text: the part from the last one is compared."""
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
        """Encode so that the prompt has the tokens that inference gives it. Returns all tokens, the character ranges of
        the answer's tokens, and the number of prompt tokens. `first` is the first token of the whole text that has a
        character of the answer; `whole`: it has no character of the prompt."""
        place = passage.turns[0].prompt
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


def border(offsets: Sequence[tuple[int, int]], place: int) -> tuple[int, bool]:
    """(the first token that covers a character from `place` on, whether it begins there and not before)."""
    if isinstance(offsets, Offsets) and (found := offsets.border(place)) is not None:
        return found, True
    token = bisect_right(offsets, place, key=lambda pair: pair[1])
    return token, token == len(offsets) or offsets[token][0] >= place


def flags(count: int, ranges: Sequence[tuple[int, int]]) -> list[bool]:
    supervised = [False] * count
    for first, last in ranges:
        supervised[first:last] = [True] * (last - first)
    return supervised


def spread(count: int, ranges: Sequence[tuple[int, int]], weights: Sequence[float]) -> list[float] | None:
    """The weight of each token: its range's, 0 outside of them. None where every weight is 1."""
    if all(weight == 1 for weight in weights):
        return None
    spread = [0.0] * count
    for (first, last), weight in zip(ranges, weights, strict=True):
        spread[first:last] = [weight] * (last - first)
    return spread


def check(tokens: Sequence[int], ranges: Sequence[tuple[int, int]], ends: frozenset[int]) -> None:
    """Refuses a degenerate mask: nothing trained, everything trained, or a turn that does not close with its end.

    `ends` are the ids that may close a turn; empty where the template closes it with ordinary text.
    """
    previous = 0
    for first, last in ranges:
        if first >= last or first < previous:
            raise Refusal(
                "nothing to train",
                "the template renders no text of the answer after its prompt, or all of it is reasoning that "
                "train_reasoning leaves out",
            )
        if ends and tokens[last - 1] not in ends:
            raise Refusal("a turn without its end token", "the last trained token is not the end token")
        previous = last
    if ranges[0][0] == 0:
        raise Refusal("everything is trained", "no token of the prompt stands before the response")
