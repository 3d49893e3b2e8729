"""Preference data: pairs of a chosen and a rejected answer to one prompt (DPO and its kin), and rated answers (KTO).

A row of pairs becomes two records with the same messages before the answer. The prompt is a column of its own, or the
turns that two whole conversations share from the start. Every assistant turn after the prompt is trained, and no turn
before it. The answers are never repaired: a pair with equal answers, without one of them or with two prompts is refused
and counted under that name, since each of these would train nothing, or something else than the preference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graftune.batch import Example
from graftune.data import columns
from graftune.data.columns import ASKS, CHATS, EXTRAS, LABELS, MEDIA, SYSTEMS, WEIGHT, filled, normal
from graftune.data.encoded import numbers_of
from graftune.data.kind import ANSWERS, DataKind, number_of
from graftune.data.record import Record, to_record
from graftune.data.row import Refusal, plain, quoted, type_name
from graftune.data.shared_prompt import DIFFERENT, EQUAL
from graftune.data.source import rows, sources
from graftune.data.turns import Message, parsed, role_of
from graftune.settings.sections import DataConfig
from graftune.settings.sources import DataValue

EMPTY = "an empty side"
# The chosen answer's column and the rejected one's. `response_0` and `response_a` are missing here: which of the two is
# the better one is said by another column.
_SIDES = (
    ("chosen", "rejected"), ("chosen_response", "rejected_response"), ("response_chosen", "response_rejected"),
    ("preferred", "dispreferred"), ("preferred_output", "non_preferred_output"), ("response_j", "response_k"),
)  # fmt: skip
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")
Answer = str | list[Any]


class PairKind(DataKind):
    """Two members of a group: the chosen answer, then the rejected one."""

    def records(self, row: dict[str, Any]) -> list[Record]:
        own = filled(row)
        sides = _sides(own)
        if sides is None:
            raise Refusal("missing key", "a pair has the columns 'chosen' and 'rejected', or name them with map")
        prompt, answers, used = _parts(row, own, sides)
        beside = {own[name] for name in (*SYSTEMS, WEIGHT, "tools", *MEDIA) if name in own}
        used |= beside | {name for side in sides if (name := own.get(side))}
        made = []
        for answer in answers:
            one = {name: row[name] for name in row if name in beside}
            made.append(_record(one | prompt | {_answer_column(prompt): answer}, answer))
        if _spoken(made[0], answers[0]) == _spoken(made[1], answers[1]):
            raise Refusal(EQUAL)
        unused = tuple(f"column not used: {plain(name)}" for name in own.values() if name not in used)
        return [replace(made[0], notes=(*made[0].notes, *unused)), made[1]]


class RatedKind(DataKind):
    """An answer and whether it is good (`label` 1) or bad (0). The answer is everything after the last user turn."""

    def records(self, row: dict[str, Any]) -> list[Record]:
        label = _label(row)
        record = to_record({name: value for name, value in row.items() if name != label})
        if record.kind == "text":
            raise Refusal("missing key", "a rated answer needs a prompt, and there is only a text")
        roles = [message["role"] for message in record.messages]
        last = max(i for i, role in enumerate(roles) if role == "user")
        return [_trained_from(record, last + 1)]

    def numbers_of(self, row: dict[str, Any]) -> dict[str, float]:
        label = _label(row)
        value = number_of(row, label)
        if value not in (0, 1):
            raise Refusal("no label", f"{label!r} must be true or false and is {quoted(row[label])}")
        return {"label": value}

    def warning(self, examples: Sequence[Example]) -> str:
        labels = numbers_of(examples, "label", 0.0)
        if not len(labels) or labels.min() != labels.max():
            return ""
        rated, other = ("good", "bad") if labels[0] else ("bad", "good")
        return f"every answer is rated {rated}: a loss for ratings also needs some that are rated {other}"


PAIRS = PairKind("pairs", members=2, takes="pairs of a chosen and a rejected answer")
RATED = RatedKind("rated answers", members=1, takes="answers rated good or bad by a column 'label'", numbers=("label",))


def kind_of_data(value: DataValue, config: DataConfig) -> DataKind:
    """The kind of data, from the first row whose columns show it; answers if no row does."""
    kinds = {kind.name: kind for kind in (PAIRS, RATED, ANSWERS)}
    for row in rows(sources(value), config.map, max_unpacked=config.max_unpacked):
        if isinstance(row.value, dict) and (found := columns.kind_of_row(row.value)):
            return kinds[found]
    return ANSWERS


def _sides(own: dict[str, str]) -> tuple[str, str] | None:
    """The two columns of answers, of which one may be missing."""
    found = [sides for sides in _SIDES if sides[0] in own or sides[1] in own]
    return max(found, key=lambda sides: sum(side in own for side in sides)) if found else None


def _label(row: dict[str, Any]) -> str:
    found = [name for name in row if normal(name) in LABELS]
    if not found:
        raise Refusal("no label", "a rated answer has a column 'label' (or 'kto_tag'), or name it with map")
    return found[0]


def _parts(
    row: dict[str, Any], own: dict[str, str], sides: tuple[str, str]
) -> tuple[dict[str, Any], list[Answer], set[str]]:
    """The columns of the prompt, both answers, and the names of the columns that were read."""
    answers = [_answer(row, own.get(side, ""), side) for side in sides]
    asked = next((own[name] for name in ASKS if name in own), "")
    chat = next((own[name] for name in CHATS if name in own), "")
    if not asked and not chat:
        answers = [_transcript(answer) for answer in answers]
    if all(isinstance(answer, list) and _is_whole(answer) for answer in answers):
        chosen, rejected = answers
        assert isinstance(chosen, list) and isinstance(rejected, list)
        count = _shared(chosen, rejected)
        if asked:
            _check_prompt(row[asked], chosen[:count], asked)
        return {"prompt": chosen[:count]}, [chosen[count:], rejected[count:]], {asked} - {""}
    if asked:
        extras = [name for name in (*EXTRAS, "history") if name in own]
        taken = [asked, *(own[name] for name in extras if name == "history" or normal(asked) == "instruction")]
        return {name: row[name] for name in taken}, answers, set(taken)
    if chat:
        return {"prompt": parsed(row[chat], f"in column {chat!r}")}, answers, {chat}
    raise Refusal("missing key", f"a prompt beside {sides[0]!r} and {sides[1]!r}, or whole conversations in them")


def _answer(row: dict[str, Any], column: str, side: str) -> Answer:
    """A side as text, or as turns where it has several, or one with more than a text."""
    value = row.get(column)
    if isinstance(value, dict):
        if role_of(value) != "assistant":
            raise Refusal("wrong type", f"{side!r} is one turn, and not the assistant's")
        value = [value]
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise Refusal(EMPTY, f"{side!r}")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        what = "a list of other things" if isinstance(value, list) else type_name(value)
        raise Refusal("wrong type", f"{side!r} must be text, a turn or a list of turns, is {what}")
    if len(value) == 1 and role_of(value[0]) == "assistant":
        text = _content(value[0])
        if len(value[0]) == 2 and isinstance(text, str) and text.strip():
            return text
    return value


def _answer_column(prompt: dict[str, Any]) -> str:
    """The name under which the answer stands beside the prompt's column, so that both are read as a pair."""
    return "answer" if any(normal(name) == "question" for name in prompt) else "response"


def _record(row: dict[str, Any], answer: Answer) -> Record:
    try:
        record = to_record(row)
    except Refusal as refusal:
        raise Refusal(EMPTY) if refusal.reason == "blank response" else refusal from None
    start = len(record.messages) - (len(answer) if isinstance(answer, list) else 1)
    if any(i >= start for i in record.skipped):
        raise Refusal(EMPTY, "one of its turns has no text")
    if record.messages[start - 1]["role"] == "assistant":
        raise Refusal("the prompt ends with an answer", "its last turn must be the user's or a tool's")
    return _trained_from(record, start)


def _trained_from(record: Record, start: int) -> Record:
    """The record with every assistant turn from `start` on trained, and none before."""
    return replace(record, flags=[False] * start + [None] * (len(record.messages) - start))


def _spoken(record: Record, answer: Answer) -> list[Message]:
    """The turns of the answer, without blanks around their text."""
    turns = record.messages[-len(answer) :] if isinstance(answer, list) else record.messages[-1:]
    return [{**turn, "content": (turn["content"] or "").strip()} for turn in turns]


def _content(turn: Message) -> Any:
    return turn["content"] if turn.get("content") is not None else turn.get("value")


def _is_whole(turns: Sequence[Any]) -> bool:
    """Whether the turns are a conversation from its start, and not only an answer."""
    return next((role for role in map(role_of, turns) if role != "system"), "") == "user"


def _same(one: Message, other: Message) -> bool:
    if one == other:
        return True
    texts = [text.strip() if isinstance(text, str) else text for text in map(_content, (one, other))]
    calls = [turn.get("tool_calls") or turn.get("function_call") for turn in (one, other)]
    return role_of(one) == role_of(other) and texts[0] == texts[1] and calls[0] == calls[1]


def _shared(chosen: list[Message], rejected: list[Message]) -> int:
    """How many leading turns two conversations share: their prompt. What follows begins with the assistant."""
    count = 0
    while count < min(len(chosen), len(rejected)) and _same(chosen[count], rejected[count]):
        count += 1
    following = [role_of(side[count]) for side in (chosen, rejected) if len(side) > count]
    if not following:
        raise Refusal(EQUAL)
    if "user" in following or "system" in following:
        raise Refusal(DIFFERENT, f"the conversations differ in turn {count + 1}, which is not an answer")
    while count and any(len(side) > count and role_of(side[count]) != "assistant" for side in (chosen, rejected)):
        count -= 1  # results of tools that differ belong to the answers, with the calls before them
    if len(following) == 1 and count == min(len(chosen), len(rejected)):
        raise Refusal(EMPTY, "one conversation ends where the other has its answer")
    return count


def _check_prompt(prompt: Any, shared: list[Message], column: str) -> None:
    """Refuse a column of prompts that says something else than the turns both conversations share."""
    if isinstance(prompt, list):
        known = len(prompt) <= len(shared) and all(map(_same, prompt, shared))
    else:
        asked = [_content(turn) for turn in shared if role_of(turn) == "user"]
        known = isinstance(prompt, str) and prompt.strip() in [str(text).strip() for text in asked]
    if not known:
        raise Refusal(DIFFERENT, f"the column {column!r} and the turns that both conversations share")


def _transcript(answer: Answer) -> Answer:
    """A conversation written as one text, as Anthropic's HH data has it: "Human: ... Assistant: ..."."""
    if isinstance(answer, list):
        return answer
    start, *parts = _SPEAKER.split(answer.strip())
    if start.strip() or not parts or parts[0] != "Human":
        return answer
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": text.strip()} for who, text in zip(parts[::2], parts[1::2], strict=True)]
