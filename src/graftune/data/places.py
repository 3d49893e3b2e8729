"""Where the trained turns of a long conversation lie in its text, without rendering every beginning of it.

What a turn is trained behind is the conversation up to that turn, rendered by itself: two renderings a turn, which is
the square of the turns in time. But what one turn adds to the text depends, in the templates that there are, on its
neighbours, its question and the system turn. So a turn is rendered in a window of these (system turn, question, the
trained turn before it, and all from there on), once up to the turn before and once up to itself. What the second has
behind the first has to stand in the whole text, letter for letter, behind the turn before. A template that writes
earlier turns anew shows it in the window; where a window does not tell, the turn's own beginning is rendered. Of every
long conversation a few turns are rendered both ways, and if the two differ anywhere, all of them are rendered whole.

Rejected: reading the places off the markers in the text, which contents may spell, and following what a template looks
at while it renders, which no template that looks back from the end would pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from graftune.data.row import Refusal
from graftune.data.turns import Message

FEW = 24  # trained turns: up to here, rendering each beginning takes no longer
CHECKED = 4  # parts of a long conversation between which a turn is rendered both ways


class Place(NamedTuple):
    """A trained turn in the text of a conversation, in characters."""

    prompt: int  # where the prompt before it ends
    start: int  # training begins here: at the prompt's end, or behind reasoning that is not trained
    end: int
    notes: tuple[str, ...] = ()


class Turn(NamedTuple):
    """One trained turn as the last of its conversation: the text up to its end token, and where it lies there."""

    text: str
    place: Place


Render = Callable[[list[Message]], Turn]  # a conversation's last message as a trained turn


def places(
    render: Render, messages: list[Message], trained: Sequence[int], begun: dict[int, Turn]
) -> list[Place] | None:
    """The places of the trained turns in the text of the last of them; None where it does not start with the text of
    each, so that they cannot be trained in one text. `begun`: takes the turns whose beginnings were rendered."""
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
    render: Render, messages: list[Message], trained: Sequence[int], begun: dict[int, Turn]
) -> list[Place] | None:
    """The places of turns by the renderings of their own beginnings, from the last to the first: a template that writes
    earlier turns anew mostly does so with the last but one."""
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
) -> Place | None:
    """Where turn i lies in `text`, in which the trained turn before it ends at `reached`; None if a window does not
    tell. `at`: that turn's question, that turn, and i."""
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
    return Place(reached + prompt - size, reached + start - size, reached + end - size, notes)
