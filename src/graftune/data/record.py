"""Rows -> records: which kind a row is, checked and brought to one shape.

Every convention (prompt/response, alpaca, OpenAI messages, ShareGPT, plain text) becomes a
`Record`: a list of messages, or one text. The kind is decided row by row from the columns present (columns.py), so a
file may mix them. Columns that no kind reads are reported, not guessed at; a wrong type or a blank field refuses the
row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graftune.data.columns import MEDIA, RATED, ColumnPlan, Kind, is_rated, normal, plan_for
from graftune.data.row import Refusal, quoted, type_name
from graftune.data.turns import (
    ROLES,
    Message,
    Turns,
    as_unicode,
    check_depth,
    check_media,
    checked_weight,
    parsed,
    unknown_role,
    weighted,
)

BLANK = "answers without a text, kept as context and not trained"
EARLY = "answers before the first user turn, kept as context and not trained"


@dataclass(frozen=True)
class Record:
    """One row, whatever columns it had. `flags[i]`: whether message i says that it is trained; None: it
    does not say. `notes` are counted for the user."""

    kind: Kind
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    tools: list[Any] | None = None
    flags: list[bool | None] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    weight: float = 1.0  # of a text's loss; messages have their own
    skipped: frozenset[int] = frozenset()  # answers that cannot be trained: blank, or before the first question


def to_record(row: dict[str, Any]) -> Record:
    plan = plan_for(row)
    if plan.refusal is not None:
        raise Refusal(*plan.refusal)
    if is_rated(plan, row):
        raise Refusal(RATED, f"column {plan.label!r}")
    for name in plan.media:
        check_media(row[name], MEDIA[normal(name)], f"column {quoted(name)}")
    weight, weighed = _weight(row, plan)
    if plan.kind == "text":
        return Record("text", text=_filled(row, plan.ask, "blank text"), notes=(*plan.notes, *weighed), weight=weight)
    tools, wrapped = _tools(row, plan)
    listed = bool(plan.answer) and (isinstance(row[plan.ask], list) or isinstance(row[plan.answer], list))
    turns = _single(row, plan) if plan.answer and not listed else _chat(row, plan)
    skipped, untrained = _skipped(turns)
    return Record(
        "messages" if listed else plan.kind,
        turns.messages if weight == 1 else [weighted(message, weight) for message in turns.messages],
        skipped=skipped,
        tools=tools,
        flags=turns.flags,
        notes=(*plan.notes, *dict.fromkeys(turns.notes), *untrained, *wrapped, *weighed),
    )


def _skipped(turns: Turns) -> tuple[frozenset[int], tuple[str, ...]]:
    """The answers that cannot be trained, and notes; raises Refusal if no other is left."""
    roles = [message["role"] for message in turns.messages]
    early = roles.index("user") if "user" in roles else len(roles)
    if not turns.blank and "assistant" not in roles[:early]:
        return frozenset(), ()
    skipped = frozenset(i for i, role in enumerate(roles) if role == "assistant" and (i < early or i in turns.blank))
    if len(skipped) == roles.count("assistant"):
        raise Refusal("blank response", f"message {turns.blank[0] + 1}")
    notes = [BLANK] if turns.blank else []
    return skipped, (*notes, EARLY) if skipped - set(turns.blank) else tuple(notes)


def _weight(row: dict[str, Any], plan: ColumnPlan) -> tuple[float, tuple[str, ...]]:
    """The factor of the row's loss, and notes."""
    value = row[plan.weight] if plan.weight else None
    if value is None:
        return 1.0, ()
    if isinstance(value, str):  # as CSV files have it
        try:
            value = float(value)
        except ValueError:
            raise Refusal("wrong type", f"{plan.weight!r} must be a number, is {quoted(value)}") from None
    weight = checked_weight(value, f"{plan.weight!r}")
    if not weight:
        raise Refusal("nothing to train", f"{plan.weight!r} is 0")
    return weight, ("rows whose column 'loss_weight' multiplies their loss",) if weight != 1 else ()


def _single(row: dict[str, Any], plan: ColumnPlan) -> Turns:
    turns = Turns()
    for message in _system(row, plan):
        turns.add(message)
    _history(row, plan, turns)
    prompt = _filled(row, plan.ask, "blank prompt")
    extra = _text(row, plan.extra) if plan.extra and row.get(plan.extra) is not None else ""
    if extra.strip():
        prompt = f"{prompt}\n\n{extra}"
    turns.add({"role": "user", "content": prompt})
    turns.add({"role": "assistant", "content": _filled(row, plan.answer, "blank response")})
    return turns


def _history(row: dict[str, Any], plan: ColumnPlan, turns: Turns) -> None:
    """LLaMA-Factory's column of earlier exchanges: [[question, answer], ...]."""
    pairs = _nested(row, plan.history) if plan.history else None
    if pairs in (None, "", []):
        return
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise Refusal("wrong type", f"{plan.history!r} must be a list of [question, answer]")
    for question, answer in pairs:
        turns.convert({"role": "user", "content": question})
        turns.convert({"role": "assistant", "content": answer})


def _chat(row: dict[str, Any], plan: ColumnPlan) -> Turns:
    """A column of turns; or TRL's prompt and completion as lists of turns, of which the completion is trained."""
    turns = Turns()
    if plan.answer:
        for number, key, role in ((0, plan.ask, "user"), (1, plan.answer, "assistant")):
            value = row[key]
            if not isinstance(value, list):
                _filled(row, key, "blank response" if number else "blank prompt")
            for turn in value if isinstance(value, list) else [{"role": role, "content": value}]:
                _convert(turns, turn, key)
                if not number and turns.messages[-1]["role"] == "assistant":
                    turns.flags[-1] = False
    else:
        value = _nested(row, plan.ask)
        if not isinstance(value, list):
            raise Refusal("wrong type", f"{plan.ask!r} must be a list of objects, is {type_name(value)}")
        if not value:
            raise Refusal("no turns", f"{plan.ask!r} is an empty list")
        for turn in value:
            _convert(turns, turn, plan.ask)
    _join_system(row, plan, turns)
    roles = [message["role"] for message in turns.messages]
    trained = "assistant" in roles
    if trained and "user" in roles[: len(roles) - 1 - roles[::-1].index("assistant")]:
        return turns
    for place, role in enumerate(roles, 1):
        if role not in ROLES:
            raise unknown_role(role, place)
    raise Refusal("no user turn before the first assistant turn" if trained else "no assistant turn")


def _convert(turns: Turns, turn: object, key: str) -> None:
    if not isinstance(turn, dict):
        raise Refusal("wrong type", f"{key!r} must be a list of objects, is a list of other things")
    turns.convert(turn)


def _join_system(row: dict[str, Any], plan: ColumnPlan, turns: Turns) -> None:
    """Put the system column before the turns. If there is a system turn too, both must be equal."""
    column = _system(row, plan)
    if not column:
        return
    if turns.messages[0]["role"] != "system":
        turns.messages[:0], turns.flags[:0] = column, [None]
        turns.blank = [i + 1 for i in turns.blank]
    elif turns.messages[0]["content"].strip() != column[0]["content"].strip():
        raise Refusal("two system prompts", f"the column {plan.system!r} and the first turn differ")


def _tools(row: dict[str, Any], plan: ColumnPlan) -> tuple[list[Any] | None, tuple[str, ...]]:
    """The tools in OpenAI's form, which templates are written for, and notes."""
    tools = _nested(row, plan.tools) if plan.tools else None
    if tools is None or (isinstance(tools, str) and not tools.strip()):
        return None, ()
    tools = parsed(tools, f"in {plan.tools!r}")
    if not isinstance(tools, list):
        raise Refusal("wrong type", f"{plan.tools!r} must be a list, is {type_name(tools)}")
    if not all(isinstance(tool, dict) for tool in tools):
        raise Refusal("wrong type", f"{plan.tools!r} must be a list of objects")
    check_depth(tools, f"{plan.tools!r}")
    bare = [isinstance(tool.get("name"), str) and "function" not in tool for tool in tools]
    if any(bare):
        tools = [{"type": "function", "function": t} if is_bare else t for t, is_bare in zip(tools, bare, strict=True)]
    return tools or None, ("tools given without 'type' and 'function', wrapped as OpenAI's are",) if any(bare) else ()


def _nested(row: dict[str, Any], key: str) -> Any:
    """A column of lists; CSV files and many published data sets keep them as JSON text."""
    value = row[key]
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        return parsed(value, f"in column {key!r}")
    return value


def _system(row: dict[str, Any], plan: ColumnPlan) -> list[Message]:
    if not plan.system or row[plan.system] is None:
        return []
    content = _text(row, plan.system)
    return [{"role": "system", "content": content}] if content.strip() else []


def _text(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise Refusal("wrong type", f"{key!r} must be text, is {type_name(value)}")
    return as_unicode(value)


def _filled(row: dict[str, Any], key: str, reason: str) -> str:
    value = _text(row, key)
    if not value or value.isspace():
        raise Refusal(reason, f"{key!r}")
    return value


def trained_turns(record: Record, train_on: str) -> tuple[int, ...]:
    """Indices of the messages to train; raises Refusal where there is none.

    A turn that is marked as untrained ("train": false, or OpenAI's "weight": 0) is context only."""
    turns = [
        i for i, message in enumerate(record.messages) if message["role"] == "assistant" and i not in record.skipped
    ]
    if train_on == "flagged" and record.kind in ("messages", "conversations"):
        wrong = [i for i, flag in enumerate(record.flags) if flag and record.messages[i]["role"] != "assistant"]
        if wrong:
            raise Refusal("a flag on a turn that is not the assistant's", f"message {wrong[0] + 1}")
        turns = [i for i in turns if record.flags[i]]
        if not turns:
            raise Refusal("nothing to train", 'no assistant turn has "train": true or "weight": 1')
    wanted = [i for i in (turns[-1:] if train_on == "last" else turns) if record.flags[i] is not False]
    if not wanted:
        which = "the last" if train_on == "last" else "every"
        raise Refusal("nothing to train", f'{which} assistant turn has "train": false or "weight": 0')
    return tuple(wanted)
