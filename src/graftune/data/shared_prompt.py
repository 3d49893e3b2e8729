"""Answers to one prompt -> examples whose prompts are identical, token for token, also where they are shortened.

A loss that compares two answers compares their probabilities after the same text. Shortening each answer's example
alone would give the longer answer a shorter prompt. So the cut is looked for once, for the longest member, and
every member is rendered with it: first without early turns, then with the start of the last question cut off,
then the prompt's tokens themselves are cut from the left behind BOS (fit.py says why in this order). An answer is
never cut: where one does not fit, the row is refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

from graftune.batch import Example
from graftune.data.chat import Passage
from graftune.data.fit import PROMPT, QUESTION, TOO_LONG, TURNS, Built, Fitter, start_turns, user_turns
from graftune.data.record import Message
from graftune.data.row import Refusal

EQUAL, DIFFERENT = "equal answers", "different prompts"
SEVERAL = "the template makes several examples of one of its conversations; keep the last turn"


class _Member(NamedTuple):
    passage: Passage
    example: Example
    start: int  # tokens before its answer
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return len(self.example.tokens)


Members = list[_Member]


def fit_together(
    fitter: Fitter, passages: Sequence[Passage], encoded: Sequence[tuple[list[int], Any]], row: int
) -> list[Built]:
    """The examples of passages that answer one prompt; raises Refusal."""
    fit = _Fit(fitter, row)
    return fit.built([fit.member(passage, *one) for passage, one in zip(passages, encoded, strict=True)])


class _Fit:
    def __init__(self, fitter: Fitter, row: int):
        self.fitter, self.limit, self.row = fitter, fitter.limit, row

    def member(self, passage: Passage, tokens: list[int], offsets: Any) -> _Member:
        found = self.fitter.ranges(passage, tokens, offsets)
        if found is None:
            raise Refusal("an incomplete group", SEVERAL)
        tokens, ranges, notes = found
        example = self.fitter.example(passage, tokens, ranges, self.row)
        (start, _), prompt = passage.spans[0], passage.prompts[0]
        # Reasoning that is not trained is a part of the answer. `ranges` has made sure that the prompt's tokens are
        # those of the prompt alone.
        first = ranges[0][0] if start == prompt else len(self.fitter.encoded(passage.text[:prompt])[0])
        return _Member(passage, example, first, notes)

    def built(self, members: Members) -> list[Built]:
        _check(members)
        if self._fits(members):
            return _as_built(members, "")
        if max(member.size - member.start for member in members) >= self.limit:
            raise Refusal(TOO_LONG)
        asked, shorter = self._without_early_turns(members)
        if shorter is not None:
            return _as_built(shorter, TURNS)
        shorter = self._with_shorter_question(members, asked)
        if shorter is not None:
            return _as_built(shorter, QUESTION)
        return self._with_cut_tokens(members)

    def _fits(self, members: Members) -> bool:
        return max(member.size for member in members) <= self.limit

    def _after(self, asked: list[Message], members: Members) -> Members:
        """The members with these messages as their prompt."""
        made = []
        for passage, *_ in members:
            first = passage.trained[0]
            messages = [*asked, *passage.messages[first:]]
            trained = [i - first + len(asked) for i in passage.trained]
            text = self.fitter.turns.together(messages, passage.tools, trained)
            if text is None:
                raise Refusal("an incomplete group", SEVERAL)
            made.append(self.member(text, *self.fitter.encoded(text.text)))
        _check(made)
        return made

    def _without_early_turns(self, members: Members) -> tuple[list[Message], Members | None]:
        """The prompt with as many turns as fit, and the members with it; None where even the last question alone is
        too long."""
        passage = members[0].passage
        prompt = passage.messages[: passage.trained[0]]
        head = prompt[:1] if prompt[0]["role"] == "system" else []
        starts = start_turns([*prompt, passage.messages[passage.trained[0]]], user_turns(prompt))
        if not starts:
            return prompt, None
        tried: dict[int, Members] = {}

        def fits(start: int) -> bool:
            tried[start] = self._after([*head, *prompt[start:]], members)
            return self._fits(tried[start])

        found = bisect_left(starts, True, key=fits)
        if found == len(starts):
            return [*head, *prompt[starts[-1] :]], None
        return [], tried[starts[found]]

    def _with_shorter_question(self, members: Members, asked: list[Message]) -> Members | None:
        place = user_turns(asked)[-1]
        content = asked[place]["content"]
        offsets, shorter, excess = self.fitter.question_offsets(content), members, 0
        if len(asked) < members[0].passage.trained[0]:
            shorter = self._after(asked, members)
        while (excess := excess + max(member.size for member in shorter) - self.limit) < len(offsets):
            kept = content[offsets[excess][0] :]
            if not kept.strip():
                return None
            try:
                shorter = self._after([*asked[:place], {**asked[place], "content": kept}, *asked[place + 1 :]], members)
            except Refusal:  # a template that reads the question; the tokens are cut instead
                return None
            if self._fits(shorter):
                return shorter
        return None

    def _with_cut_tokens(self, members: Members) -> list[Built]:
        prompt = members[0].example.tokens[: members[0].start]
        bos = int(prompt[0] == self.fitter.tokenizer.bos_id)
        keep = self.limit - bos - max(member.size - member.start for member in members)
        if keep + bos < 1:
            raise Refusal(TOO_LONG)
        kept = [*prompt[:bos], *prompt[len(prompt) - keep :]]
        cut = []
        for member in members:
            example, start = member.example, member.start
            weights = None if example.weights is None else [0.0] * len(kept) + example.weights[start:]
            supervised = [False] * len(kept) + example.supervised[start:]
            shorter = Example(kept + example.tokens[start:], supervised, self.row, weights)
            cut.append(member._replace(example=shorter, start=len(kept)))
        text = self.fitter.tokenizer.decode(kept)
        return [built._replace(prompt=text) for built in _as_built(cut, PROMPT)]


def _check(members: Members) -> None:
    """Refuse answers after other tokens than the first one's, and answers that are all equal."""
    tokens, start = members[0].example.tokens, members[0].start
    if any(member.start != start or member.example.tokens[:start] != tokens[:start] for member in members[1:]):
        raise Refusal(DIFFERENT, "the template writes another prompt before one answer than before the other")
    if len(members) > 1 and all(member.example.tokens == tokens for member in members[1:]):
        raise Refusal(EQUAL, "they have the same tokens")


def _as_built(members: Members, truncated: str) -> list[Built]:
    return [
        Built(example, passage.prompt, passage.reference, passage.asked, truncated, notes=notes)
        for passage, example, _, notes in members
    ]
