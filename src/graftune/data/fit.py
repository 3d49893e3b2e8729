"""Texts -> examples of at most `max_seq_len` tokens, without ever cutting a response to make them fit.

Text is removed in this order: whole early turns (the system turn stays; trained turns among them become examples of
their own), then the last question's text from its left, by rendering the shortened message again so that every header
of the template stays whole; and if even an empty question is too long, the prompt's tokens from the left, after BOS.
Cutting the token list from the right, as trainers commonly do, would cut the end token and most of the answer.
An example whose response alone does not fit is dropped.

The answers to one prompt that a loss compares are cut together (shared_prompt.py), so the last two cuts take a list.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from graftune.batch import Example
from graftune.data.chat import ChatTurns, Passage
from graftune.data.format import ChatFormat
from graftune.data.mask import Masked, Masker
from graftune.data.row import Refusal
from graftune.data.turns import Message
from graftune.settings.sections import DataConfig
from graftune.tokenizer import Tokenizer

MANY_TURNS, MOST_TURNS = 64, 256  # most trained turns of a conversation that is rendered whole, and of one example
# Most answers to one question that become examples of their own, each with all turns before it: if the examples are
# prefixes of one text, and if the template renders the turns before each answer differently.
MOST_ALONE, MOST_RENDERED = 512, 256
TURNS, QUESTION, PROMPT = "early turns left out", "question cut from the left", "prompt cut from the left behind BOS"
TOO_LONG = "response longer than max_seq_len"


class Built(NamedTuple):
    """An example, the text to continue and the answer expected; how it was shortened; or why it is not used."""

    example: Example | None
    prompt: str
    reference: str
    messages: list[Message]  # what the prompt was rendered from
    truncated: str = ""
    dropped: str = ""
    notes: tuple[str, ...] = ()


class Fitter:
    """Builds the examples of one conversation. Holds what does not change from row to row."""

    def __init__(self, form: ChatFormat, tokenizer: Tokenizer, config: DataConfig):
        self.form, self.tokenizer, self.limit = form, tokenizer, config.longest()
        self.turns = ChatTurns(form, config.prompt_form, form.trained_reasoning(config.train_reasoning)[0])
        self.masker = Masker(form, tokenizer)
        self.question: tuple[str, list[tuple[int, int]]] = ("", [])  # the last one cut, and where its tokens lie

    def passages(self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int]) -> list[Passage]:
        """The texts of one conversation, not yet tokenised: many of them are encoded at once (`finish`). A very long
        conversation is divided first, so that what is rendered and encoded at a time is about what fits."""
        if len(trained) <= MANY_TURNS:
            return self.turns.passages(messages, tools, trained)
        return [piece.passage for piece in self._pieces(messages, tools, trained)]

    def finish(self, passage: Passage, tokens: list[int], offsets: Sequence[tuple[int, int]]) -> Iterator[Built]:
        """The examples of a passage whose text was encoded as `tokens`. Those that do not fit are shortened."""
        found = self.masker.masked(passage, tokens, offsets)
        if found is None:
            for alone in self.turns.alone(passage.messages, passage.tools, passage.trained, {}):
                yield from self.finish(alone, *self.encoded(alone.text))
        elif found.size <= self.limit:
            yield built(found)
        else:
            yield from self._without_early_turns(found)

    def encoded(self, text: str) -> tuple[list[int], Any]:
        """Ids, and lazy character offsets: computing those of all tokens of a long text takes longer than encoding."""
        return self.tokenizer.encode_batch([text])[0]

    def fit(self, answers: list[Masked]) -> bool:
        return all(one.size <= self.limit for one in answers)

    def together(self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int]) -> Masked | None:
        """These turns as one example; None if the template or the tokenizer does not allow it."""
        passage = self.turns.together(messages, tools, trained, {})
        return passage and self.masker.masked(passage, *self.encoded(passage.text))

    def _without_early_turns(self, found: Masked) -> Iterator[Built]:
        passage, pieces = found.passage, list[Masked]()
        messages, trained = passage.messages, passage.trained
        if not start_turns(messages, user_turns(messages)) and (piece := self._too_long(found)):
            pieces, trained = [piece], trained[: -len(piece.ranges)]
        for piece in [*self._pieces(messages, passage.tools, trained, too_long=not pieces), *pieces]:
            if piece.size <= self.limit:
                yield built(piece)
            else:
                yield from map(self._cut_prompt, self._each(piece))

    def _pieces(
        self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int], too_long: bool = False
    ) -> list[Masked]:
        """A conversation as examples, in order. They are built from its end: each takes as many turns as fit and leaves
        earlier trained turns to the next one. Answers that do not fit even with nothing before their question are
        returned uncut, those to one question together. `too_long`: the whole conversation is known not to fit."""
        users = user_turns(messages)
        made: list[Masked] = []
        left = len(trained)  # turns that are in no piece yet
        while left:
            last = trained[left - 1]
            start, one = self._longest_end(messages[: last + 1], tools, users, whole=bool(made) or not too_long)
            head, fits = head_of(messages) if start else 0, one.size <= self.limit
            first = bisect_right(trained, start, max(0, left - (MOST_TURNS if fits else MOST_ALONE + 1)), left)
            piece, alone, most = None, 0, MOST_ALONE
            if left - first > 1:
                kept = [i - start + head for i in trained[first:left]]
                several = self.together([*messages[:head], *messages[start : last + 1]], tools, kept)
                if several is not None and fits:
                    piece = several if several.size <= self.limit else None
                elif several is not None and (piece := self._too_long(several)):
                    alone = len(piece.ranges)
            if piece is None:
                question = users[bisect_left(users, last) - 1] if users and users[0] < last else -1
                piece, alone, most = one, left - bisect_right(trained, question, 0, left), MOST_RENDERED
            if alone > most:
                raise Refusal(
                    "too many answers to one question",
                    f"over {most}, of which each would be an example with all the others before it",
                )
            made.append(piece._replace(passage=piece.passage._replace(shortened=start > head)))
            left -= len(piece.passage.trained)
        return made[::-1]

    def _too_long(self, found: Masked) -> Masked | None:
        """The passage with only those trained turns that do not fit with all text before them, as its last one does
        not. The tokens up to each are a prefix of the last one's if every turn ends with a control token; None if one
        does not, or if there is only one turn."""
        passage, ranges = found.passage, found.ranges
        if len(ranges) < 2 or any(found.example.tokens[last - 1] not in self.masker.special for _, last in ranges):
            return None
        fit = sum(last <= self.limit for _, last in ranges[:-1])
        shown = passage._replace(turns=passage.turns[fit:], trained=passage.trained[fit:])
        return found._replace(passage=shown, ranges=ranges[fit:])

    def _each(self, found: Masked) -> Iterator[Masked]:
        """Yields each trained turn of a passage as a passage of its own, with the text before it."""
        whole = found.passage
        for i, turn, place in zip(whole.trained, whole.turns, found.ranges, strict=True):
            one = Passage(whole.text[: turn.end], (turn,), whole.messages[: i + 1], (i,), whole.tools, whole.notes)
            example = self.masker.example(one, found.example.tokens[: place[1]], [place])
            yield Masked(one, example, [place])

    def _longest_end(
        self, messages: list[Message], tools: list[Any] | None, users: list[int], *, whole: bool
    ) -> tuple[int, Masked]:
        """The earliest user turn from which the rest of a conversation fits, with the example of its last turn.
        `users`: where user turns are. `whole`: whether the conversation may also stay whole."""
        head, starts = head_of(messages), start_turns(messages, users)
        starts = [0, *starts] if whole or not starts else starts

        def last_turn(start: int) -> list[Masked]:
            return self._last([*messages[: head if start else 0], *messages[start:]], tools)

        start, (one,) = self.earliest(starts, last_turn)
        return start, one

    def earliest(self, starts: list[int], rendered: Callable[[int], list[Masked]]) -> tuple[int, list[Masked]]:
        """The earliest of these turns from which all answers fit, with the answers; the last turn where none does. The
        search starts at the end with steps that double, so its cost depends on what fits, not on the conversation's
        length. `rendered`: the answers where the conversation begins at a turn."""
        fits, worst, step = len(starts) - 1, -1, 1
        best = rendered(starts[fits])
        while self.fit(best) and fits - worst > 1:
            place = (fits + worst) // 2 if worst >= 0 else max(0, fits - step)
            found = rendered(starts[place])
            if self.fit(found):
                fits, best, step = place, found, 2 * step
            else:
                worst = place
        return starts[fits], best

    def _last(self, messages: list[Message], tools: list[Any] | None) -> list[Masked]:
        """The last turn of a conversation as an example."""
        found = self.together(messages, tools, [len(messages) - 1])
        assert found is not None  # one trained turn is always one text
        return [found]

    def _cut_prompt(self, found: Masked) -> Built:
        """Shortens the prompt of one trained turn until the example fits."""
        start = found.ranges[0][0]
        if found.size - start >= self.limit:
            return Built(None, "", found.passage.reference, [], dropped=TOO_LONG)
        passage = found.passage

        def rendered(asked: list[Message]) -> list[Masked]:
            return self._last([*asked, passage.messages[-1]], passage.tools)

        return (self.cut_question(rendered, passage.asked, [found]) or self.cut_tokens([found], [start]))[0]

    def cut_question(
        self, rendered: Callable[[list[Message]], list[Masked]], asked: list[Message], answers: list[Masked]
    ) -> list[Built]:
        """The answers with the start of the last question cut off; an empty list if that is not enough. `answers` are
        those to the messages `asked`; `rendered(messages)` renders them as answers to other messages."""
        place = user_turns(asked)[-1]
        content, excess = asked[place]["content"], 0
        if content != self.question[0]:  # the last question is cached: hundreds of answers may follow it
            self.question = content, self.tokenizer.encode_with_offsets(content)[1]
        offsets = self.question[1]
        while (excess := excess + max(one.size for one in answers) - self.limit) < len(offsets):
            kept = content[offsets[excess][0] :]
            if not kept.strip():
                break
            try:
                answers = rendered([*asked[:place], {**asked[place], "content": kept}, *asked[place + 1 :]])
            except Refusal:  # the template refuses the shorter question; the tokens are cut
                break
            if self.fit(answers):
                return [built(one, QUESTION) for one in answers]
        return []

    def cut_tokens(self, answers: list[Masked], starts: list[int]) -> list[Built]:
        """The answers with the same tokens cut from the left of their prompts, behind BOS. `starts`: tokens before each
        answer."""
        prompt = answers[0].example.tokens[: starts[0]]
        bos = int(prompt[0] == self.tokenizer.bos_id)
        longest = max(one.size - start for one, start in zip(answers, starts, strict=True))
        kept = [*prompt[:bos], *prompt[len(prompt) - (self.limit - bos - longest) :]]
        text, made = self.tokenizer.decode(kept), list[Built]()
        for one, start in zip(answers, starts, strict=True):
            example = one.example
            cut = Example(
                kept + example.tokens[start:],
                [False] * len(kept) + example.supervised[start:],
                weights=None if example.weights is None else [0.0] * len(kept) + example.weights[start:],
            )
            made.append(built(one, PROMPT)._replace(example=cut, prompt=text))
        return made


def built(found: Masked, truncated: str = "") -> Built:
    passage = found.passage
    truncated = truncated or (TURNS if passage.shortened else "")
    return Built(found.example, passage.prompt, passage.reference, passage.asked, truncated, notes=passage.notes)


def head_of(messages: list[Message]) -> int:
    """The number of turns that stay when early turns are left out: the system turn."""
    return 1 if messages[0]["role"] == "system" else 0


def user_turns(messages: list[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "user"]


def start_turns(messages: list[Message], users: list[int]) -> list[int]:
    """The user turns at which a shortened conversation may begin."""
    return users[bisect_left(users, head_of(messages) + 1) : bisect_left(users, len(messages) - 1)]
