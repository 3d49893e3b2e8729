"""Answers to one prompt -> examples whose prompts are identical, token for token, also where they are shortened.

A loss that compares two answers compares their probabilities after the same text. Shortening each answer's example
alone would give the longer answer a shorter prompt. So the cut is looked for once, for the longest answer, and
every answer is rendered with it: first without early turns, then with the start of the last question cut off,
then the prompt's tokens themselves are cut from the left behind BOS (fit.py says why in this order). An answer is
never cut: where one does not fit, the row is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graftune.data.chat import Passage
from graftune.data.fit import TOO_LONG, TURNS, Built, Fitter, built, head_of, start_turns, user_turns
from graftune.data.mask import Masked
from graftune.data.row import Refusal
from graftune.data.turns import Message

INCOMPLETE, EQUAL, DIFFERENT = "an incomplete group", "equal answers", "different prompts"
SEVERAL = "the template makes several examples of one of its conversations; keep the last turn"


def fit_together(fitter: Fitter, passages: Sequence[Passage], encoded: Sequence[tuple[list[int], Any]]) -> list[Built]:
    """The examples of passages that answer one prompt; raises Refusal."""
    found = [fitter.masker.masked(passage, *one) for passage, one in zip(passages, encoded, strict=True)]
    answers = [one for one in found if one is not None]
    if len(answers) < len(passages):
        raise Refusal(INCOMPLETE, SEVERAL)
    starts = _checked(fitter, answers)
    if fitter.fit(answers):
        return [built(one) for one in answers]
    if max(one.size - start for one, start in zip(answers, starts, strict=True)) >= fitter.limit:
        raise Refusal(TOO_LONG)

    messages, first = passages[0].messages, passages[0].trained[0]

    def rendered(asked: list[Message]) -> list[Masked]:
        """The answers with these messages as their prompt."""
        made = []
        for passage in passages:
            begin = passage.trained[0]
            trained = [i - begin + len(asked) for i in passage.trained]
            one = fitter.together([*asked, *passage.messages[begin:]], passage.tools, trained)
            if one is None:
                raise Refusal(INCOMPLETE, SEVERAL)
            made.append(one)
        _checked(fitter, made)
        return made

    asked, shorter = messages[:first], answers
    if starts_of_turns := start_turns(messages[: first + 1], user_turns(asked)):
        head = asked[: head_of(asked)]
        begin, shorter = fitter.earliest(starts_of_turns, lambda start: rendered([*head, *messages[start:first]]))
        if fitter.fit(shorter):
            return [built(one, TURNS) for one in shorter]
        asked = [*head, *messages[begin:first]]
    return fitter.cut_question(rendered, asked, shorter) or fitter.cut_tokens(answers, starts)


def _checked(fitter: Fitter, answers: list[Masked]) -> list[int]:
    """The tokens before each answer; raises Refusal for answers to other prompts, and where all answers are equal."""
    starts = [_start(fitter, one) for one in answers]
    tokens, start = answers[0].example.tokens, starts[0]
    if any(
        other != start or one.example.tokens[:start] != tokens[:start]
        for one, other in zip(answers, starts, strict=True)
    ):
        raise Refusal(DIFFERENT, "the template writes another prompt before one answer than before the other")
    if len(answers) > 1 and all(one.example.tokens == tokens for one in answers[1:]):
        raise Refusal(EQUAL, "they have the same tokens")
    return starts


def _start(fitter: Fitter, answer: Masked) -> int:
    """The number of tokens before an answer, which may begin with untrained reasoning. The masker has made sure that
    the prompt's tokens are those of the prompt alone."""
    turn = answer.passage.turns[0]
    if turn.start == turn.prompt:
        return answer.ranges[0][0]
    return len(fitter.encoded(answer.passage.text[: turn.prompt])[0])
