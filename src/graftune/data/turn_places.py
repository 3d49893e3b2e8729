"""Finds the trained turns of a long conversation in its text, without rendering every prefix of the conversation.

The prompt of a turn is the conversation up to that turn, rendered alone. Two renderings per turn take time that grows
with the square of the turns. But the text that one turn adds depends, in known templates, only on its neighbours, its
question and the system turn. So a turn is rendered in a window (system turn, question, the trained turn before it, and
everything from there on), once up to the turn before and once including the turn. The difference must follow the turn
before in the whole text, letter for letter. A template that rewrites earlier turns shows it in the window; if a window
does not match, the whole prefix is rendered. A few turns of every long conversation are rendered both ways, and if the
two differ anywhere, all prefixes are rendered.

Rejected: searching the text for markers, which contents may contain; and tracing what a template reads while it
renders, because a template that searches from the end reads everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from graftune.data.row import Refusal
from graftune.data.turns import Message

FEW = 24  # trained turns: up to here, rendering each beginning takes no longer
CHECKED = 4  # parts of a long conversation between which a turn is rendered both ways


class TurnPlace(NamedTuple):
    """A trained turn in the text of a conversation, in characters."""

    prompt: int  # where the prompt before it ends
    start: int  # training begins here: at the prompt's end, or after reasoning that is not trained
    end: int
    notes: tuple[str, ...] = ()


class RenderedTurn(NamedTuple):
    """A trained turn as the last of its conversation: the text up to its end token, and the turn's place in it."""

    text: str
    place: TurnPlace


Render = Callable[[list[Message]], RenderedTurn]  # a conversation's last message as a trained turn


def places(
    render: Render, messages: list[Message], trained: Sequence[int], begun: dict[int, RenderedTurn]
) -> list[TurnPlace] | None:
    """The places of the trained turns in the text of the last one; None if that text does not start with the text of
    each, so that they cannot be trained in one text. `begun` collects the turns whose prefixes were rendered."""
    if len(trained) <= FEW:
        return _rendered(render, messages, trained, begun)
    ends = {0, 1, len(trained) - 2, len(trained) - 1, *(len(trained) * part // CHECKED for part in range(1, CHECKED))}
    if _rendered(render, messages, [trained[at] for at in sorted(ends)], begun) is None:
        return None
    text, questions = begun[trained[-1]].text, _questions(messages)
    found = [begun[trained[0]].place]
    for before, i in pairwise(trained):
        place = _in_window(render, messages, (questions[before], before, i), text, found[-1].end)
        if place is None:
            alone = _rendered(render, messages, [i, trained[-1]], begun)
            if alone is None:
                return None
            place = alone[0]
        elif i in begun and place != begun[i].place:
            return _rendered(render, messages, trained, begun)
        found.append(place)
    return found


def _rendered(
    render: Render, messages: list[Message], trained: Sequence[int], begun: dict[int, RenderedTurn]
) -> list[TurnPlace] | None:
    """The places of turns by rendering their prefixes, from the last to the first: a template that rewrites earlier
    turns mostly rewrites the last but one."""
    for i in reversed(trained):
        if i not in begun:
            begun[i] = render(messages[: i + 1])
        if not begun[trained[-1]].text.startswith(begun[i].text):
            return None
    return [begun[i].place for i in trained]


def _questions(messages: list[Message]) -> list[int]:
    """For each message the last user turn before it, -1 where there is none."""
    found, last = [], -1
    for i, message in enumerate(messages):
        found.append(last)
        if message["role"] == "user":
            last = i
    return found


def _in_window(
    render: Render, messages: list[Message], at: tuple[int, int, int], text: str, reached: int
) -> TurnPlace | None:
    """Where turn i lies in `text`, in which the trained turn before it ends at `reached`; None if the window does not
    match. `at`: that turn's question, that turn, and i."""
    question, before, i = at
    head = [messages[0]] if messages[0]["role"] == "system" else []
    if question < len(head):
        return None
    lead = [*head, messages[question], messages[before]]
    try:
        first, second = render(lead), render([*lead, *messages[before + 1 : i + 1]])
    except Refusal:
        return None
    size = len(first.text)
    added = second.text[size:]
    if not second.text.startswith(first.text) or second.place.prompt < size or not text.startswith(added, reached):
        return None
    prompt, start, end, notes = second.place
    return TurnPlace(reached + prompt - size, reached + start - size, reached + end - size, notes)
