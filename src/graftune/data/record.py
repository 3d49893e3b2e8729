"""Rows -> records: which kind a row is, checked and brought to one shape.

Whatever the file's convention (prompt/response, alpaca, OpenAI messages, ShareGPT, plain text), what comes out is a
`Record`: a list of messages, or one text. The kind is decided row by row from the keys present, so a file may mix
them. Columns that no kind reads are reported, not guessed at; a wrong type or a blank field refuses the row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from graftune.data.source import Refusal, type_name

Kind = Literal["messages", "conversations", "alpaca", "prompt/response", "text"]
Message = dict[str, Any]

# Pairs that mean "the user's turn" and "the answer"; the first pair whose keys are both present is taken.
_PAIRS = (("prompt", "response"), ("prompt", "completion"), ("question", "answer"))
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
_KNOWN = "prompt/response, prompt/completion, question/answer, instruction/output, messages, conversations or text"


@dataclass(frozen=True)
class Record:
    """One row as the rest of the package sees it. `flags[i]` is message i's own wish to be trained, if any."""

    kind: Kind
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    tools: list[Any] | None = None
    flags: list[bool | None] = field(default_factory=list)
    ignored: tuple[str, ...] = ()

    @property
    def flagged(self) -> bool:
        return any(flag is not None for flag in self.flags)


def to_record(row: dict[str, Any]) -> Record:
    """The record a row holds; raises Refusal."""
    if "messages" in row:
        return _chat(row, "messages", _from_openai)
    if "conversations" in row:
        return _chat(row, "conversations", _from_sharegpt)
    if "instruction" in row and "output" in row:
        prompt = _filled(row, "instruction", "blank prompt")
        extra = _text(row, "input") if row.get("input") is not None else ""
        if extra.strip():
            prompt = f"{prompt}\n\n{extra}"
        return _single(row, "alpaca", prompt, "output", ("instruction", "input", "output"))
    for ask, answer in _PAIRS:
        if ask in row and answer in row:
            return _single(row, "prompt/response", _filled(row, ask, "blank prompt"), answer, (ask, answer))
    if "text" in row:
        return Record("text", text=_filled(row, "text", "blank text"), ignored=_others(row, ("text",)))
    for ask, answer in (*_PAIRS, ("instruction", "output")):
        if (ask in row) != (answer in row) and ask != "prompt":
            raise Refusal("missing key", f"{answer if ask in row else ask!r} beside {ask if ask in row else answer!r}")
    if "prompt" in row or "response" in row or "completion" in row:
        raise Refusal("missing key", "a prompt needs a response (or completion) beside it")
    raise Refusal("unknown keys", f"found {_listed(row)}; expected {_KNOWN}")


def _single(row: dict[str, Any], kind: Kind, prompt: str, answer: str, used: Sequence[str]) -> Record:
    messages = _system(row)
    messages += [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": _filled(row, answer, "blank response")},
    ]
    return Record(kind, messages, flags=[None] * len(messages), ignored=_others(row, (*used, "system")))


def _chat(row: dict[str, Any], key: Kind, convert: Any) -> Record:
    turns = row[key]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        shown = type_name(turns) if not isinstance(turns, list) else "a list of other things"
        raise Refusal("wrong type", f"{key!r} must be a list of objects, is {shown}")
    if not turns:
        raise Refusal("no turns", f"{key!r} is an empty list")
    pairs = [convert(place, turn) for place, turn in enumerate(turns, 1)]
    pairs = [pair for pair in pairs if not (pair[0]["role"] == "system" and not pair[0]["content"].strip())]
    messages = [message for message, _ in pairs]
    if not messages or messages[0]["role"] != "system":
        extra = _system(row)
        messages, pairs = extra + messages, [(m, None) for m in extra] + pairs
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise Refusal("no assistant turn")
    if "user" not in roles[: roles.index("assistant")]:
        raise Refusal("no user turn before the first assistant turn")
    tools = row.get("tools")
    if isinstance(tools, str):  # many published data sets keep them as JSON text
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise Refusal("broken JSON", "in 'tools'") from None
    if tools is not None and not isinstance(tools, list):
        raise Refusal("wrong type", f"'tools' must be a list, is {type_name(tools)}")
    ignored = _others(row, (key, "tools", "system"))
    return Record(key, messages, tools=tools or None, flags=[flag for _, flag in pairs], ignored=ignored)


def _from_openai(place: int, turn: Message) -> tuple[Message, bool | None]:
    role = turn.get("role")
    if not isinstance(role, str) or not role:
        raise Refusal("wrong type", f"message {place} has no 'role'")
    message = {k: v for k, v in turn.items() if k not in ("train", "weight") and v is not None}
    message["content"] = _content(place, turn.get("content"))
    calls = turn.get("tool_calls")
    if calls:
        message["tool_calls"] = _tool_calls(place, calls)
    else:
        message.pop("tool_calls", None)
    if not message["content"].strip() and not calls and role in ("user", "assistant"):
        raise Refusal("blank response" if role == "assistant" else "blank prompt", f"message {place}")
    return message, _flag(place, turn)


def _content(place: int, content: object) -> str:
    """Text, or OpenAI's list of text parts. None (beside tool calls) becomes "": templates would print None."""
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) and p.get("type", "text") == "text" else None for p in content]
        if not all(isinstance(part, str) for part in parts):
            raise Refusal("wrong type", f"message {place} has content that is not text")
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str):
        raise Refusal("wrong type", f"the content of message {place} must be text, is {type_name(content)}")
    return _unicode(content)


def _tool_calls(place: int, calls: object) -> list[Any]:
    """Arguments as objects: OpenAI sends them as JSON text, and templates that print JSON would quote them twice."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Refusal("wrong type", f"the tool_calls of message {place} must be a list of objects")
    result = []
    for call in calls:
        holder = call.get("function", call)
        if isinstance(holder, dict) and isinstance(holder.get("arguments"), str):
            try:
                arguments = json.loads(holder["arguments"])
            except ValueError:
                raise Refusal("broken JSON", f"in a tool call's arguments, message {place}") from None
            holder = {**holder, "arguments": arguments}
            call = {**call, "function": holder} if "function" in call else holder
        result.append(call)
    return result


def _flag(place: int, turn: Message) -> bool | None:
    train, weight = turn.get("train"), turn.get("weight")
    if train is not None:
        if not isinstance(train, bool):
            raise Refusal("wrong type", f"'train' of message {place} must be true or false")
        return train
    if weight is None:
        return None
    if isinstance(weight, bool) or weight not in (0, 1):
        raise Refusal("wrong type", f"'weight' of message {place} must be 0 or 1")
    return bool(weight)


def _from_sharegpt(place: int, turn: Message) -> tuple[Message, bool | None]:
    speaker, value = turn.get("from"), turn.get("value")
    role = _SHAREGPT_ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        raise Refusal("unknown speaker", f"turn {place} is from {speaker!r}; expected human, gpt, system or tool")
    if not isinstance(value, str):
        raise Refusal("wrong type", f"the value of turn {place} must be text, is {type_name(value)}")
    if not value.strip() and role in ("user", "assistant"):
        raise Refusal("blank response" if role == "assistant" else "blank prompt", f"turn {place}")
    return {"role": role, "content": _unicode(value)}, _flag(place, turn)


def _system(row: dict[str, Any]) -> list[Message]:
    if row.get("system") is None:
        return []
    content = _text(row, "system")
    return [{"role": "system", "content": content}] if content.strip() else []


def _text(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise Refusal("wrong type", f"{key!r} must be text, is {type_name(value)}")
    return _unicode(value)


def _filled(row: dict[str, Any], key: str, reason: str) -> str:
    value = _text(row, key)
    if not value.strip():
        raise Refusal(reason, f"{key!r}")
    return value


def _unicode(text: str) -> str:
    """JSON may escape half of a surrogate pair; no tokenizer can encode that."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Refusal("not Unicode text", f"a lone surrogate at character {error.start + 1}") from None
    return text


def _others(row: dict[str, Any], used: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(key) for key in row if key not in used)


def _listed(row: dict[str, Any]) -> str:
    shown = [repr(str(key)) for key in row][:6]
    return (", ".join(shown) + (", ..." if len(row) > 6 else "")) or "no keys"
