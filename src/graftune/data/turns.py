"""One turn of a conversation -> a message in the form that chat templates read (OpenAI's).

Turns are written as role/content or as from/value, with the speakers' names of a dozen tools; calls of functions as
`tool_calls`, as OpenAI's older `function_call`, or as ShareGPT turns of a speaker of their own. All of it is converted
to the form in which an inference server hands messages to the template. A row with anything that this form cannot hold
is refused, with the reason; unusual spellings are noted.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graftune.data.columns import MEDIA, normal
from graftune.data.row import Refusal, quoted, type_name
from graftune.io.json_file import DEEPEST, is_deep

Message = dict[str, Any]


class WeightedMessage(Message):
    """A message whose tokens have another weight than 1 in the loss. The weight is an attribute, not a key, so
    templates do not see it; it stays with the message when a conversation is cut or divided."""

    def __init__(self, message: Message, weight: float):
        super().__init__(message)
        self.loss_weight = weight


def loss_weight(message: Message) -> float:
    return message.loss_weight if isinstance(message, WeightedMessage) else 1.0


def weighted(message: Message, weight: float) -> Message:
    return message if weight == 1 else WeightedMessage(message, weight * loss_weight(message))


def checked_weight(value: object, what: str) -> float:
    """A number of 0 or more, that 32 bits hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_WEIGHT:
        raise Refusal("wrong type", f"{what} must be a number of 0 or more, at most {MOST_WEIGHT:g}")
    return float(value)


MOST_WEIGHT = 1e6  # of a token: one that large already leaves nothing to the others
ROLES = {
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "ai": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool", "tool_response": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip
_COMMON = ("user", "assistant")  # turns with only one of these roles and a content take a faster path
_PLAIN = frozenset({"user", "assistant", "system", "tool", "human", "gpt"})  # need no note
_OUTER = ("id", "type")  # keys of a call beside its function
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA = ("image", "audio", "video")
_ASIDE = frozenset({"train", "weight", "role", "from", "content", "value", "function_call", "refusal", "tool_calls"})


@dataclass
class Turns:
    """The messages of a row as they are converted. `flags[i]`: whether message i says that it is trained; None: it does
    not say."""

    messages: list[Message] = field(default_factory=list)
    flags: list[bool | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    blank: list[int] = field(default_factory=list)  # answers without a text

    def add(self, message: Message, flag: bool | None = None) -> None:
        self.messages.append(message)
        self.flags.append(flag)

    def convert(self, turn: dict[str, Any]) -> None:
        """Converts and adds the next turn of the data."""
        place = len(self.messages) + 1
        if len(turn) == 2 and turn.get("role") in _COMMON and isinstance(turn.get("content"), str):
            text = as_unicode(turn["content"])
            if not text or text.isspace():
                self._blank(turn["role"], place)
            return self.add({"role": turn["role"], "content": text})
        role = self._role(turn, place)
        check_turn_media(turn, place)
        content = _content(place, turn["content"] if turn.get("content") is not None else turn.get("value"))
        message: Message = {"role": role, "content": content}
        message.update((k, v) for k, v in turn.items() if k not in _ASIDE and v is not None)
        if len(message) > 2:
            check_depth(message, f"message {place}")
        if role == "call":
            role = message["role"] = "assistant"
            message |= {"content": None, "tool_calls": self._spoken_calls(content, place)}
        elif turn.get("tool_calls") or turn.get("function_call") or turn.get("refusal"):
            self._beside(message, turn, place)
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
            message["content"] = message["content"] or ""
        if role in ("user", "assistant") and not (message["content"] or "").strip() and "tool_calls" not in message:
            self._blank(role, place)
        flag, weight = _flag(place, turn)
        if weight != 1:
            self.notes.append("turns whose 'weight' multiplies their loss")
        self.add(weighted(message, weight), flag)

    def _blank(self, role: str, place: int) -> None:
        """A blank answer is context, and not trained; a blank question refuses the row."""
        if role != "assistant":
            raise Refusal("blank prompt", f"message {place}")
        self.blank.append(len(self.messages))

    def _role(self, turn: dict[str, Any], place: int) -> str:
        own = turn.get("role")
        speaker = own if own is not None else turn.get("from")
        if not isinstance(speaker, str) or not speaker.strip():
            raise Refusal("wrong type", f"message {place} has no 'role' (or 'from')")
        role = ROLES.get(speaker)
        if role is None:
            role = ROLES.get(speaker.strip().lower())
            if role is None:
                if own is None:
                    raise unknown_role(speaker, place)
                return speaker  # a role that the model's template may know
        if speaker not in _PLAIN:
            read_as = "the assistant's tool call" if role == "call" else role
            self.notes.append(f"turns of {quoted(speaker)} read as {read_as}")
        return role

    def _beside(self, message: Message, turn: dict[str, Any], place: int) -> None:
        """Adds the turn's tool calls, its function_call (OpenAI's older form) or its refusal to the message."""
        if message["role"] != "assistant":
            what = next(name for name in ("tool_calls", "function_call", "refusal") if turn.get(name))
            raise Refusal(f"{what} in a turn that is not the assistant's", f"message {place}")
        if turn.get("tool_calls"):
            calls = parsed(turn["tool_calls"], f"in the tool_calls of message {place}")
            if not isinstance(calls, list):
                raise Refusal("wrong type", f"the tool_calls of message {place} must be a list of objects")
            message["tool_calls"] = [self._call(call, place) for call in calls]
        elif turn.get("function_call"):
            message["tool_calls"] = [self._call(turn["function_call"], place)]
            self.notes.append("'function_call' read as tool_calls")
        elif turn.get("refusal") is not None and not message["content"]:
            if not isinstance(turn["refusal"], str):
                raise Refusal("wrong type", f"the refusal of message {place} must be text")
            message["content"] = as_unicode(turn["refusal"])
            self.notes.append("'refusal' read as the assistant's text")

    def _spoken_calls(self, content: str | None, place: int) -> list[Message]:
        """The calls of a turn by the speaker function_call: its text is one call, or a list of them, in JSON."""
        calls = parsed(content or "", f"in the function call of turn {place}")
        return [self._call(call, place) for call in (calls if isinstance(calls, list) else [calls])]

    def _call(self, call: object, place: int) -> Message:
        """A call with its arguments as an object: OpenAI sends them as JSON text, and templates that print JSON would
        quote them twice."""
        holder = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(call, dict) or not isinstance(holder, dict) or not isinstance(holder.get("name"), str):
            raise Refusal("wrong type", f"a tool call of message {place} is not an object with a function's name")
        arguments = holder.get("arguments", holder.get("parameters", {}))
        if isinstance(arguments, str):
            text = arguments if arguments.strip() else "{}"
            arguments = parsed(text, f"in a tool call's arguments, message {place}")
        check_depth(arguments, f"a tool call's arguments, message {place}")
        # Keys keep their order: some templates print the whole call as JSON.
        bare = holder is call
        given = {("arguments" if k == "parameters" else k): v for k, v in holder.items() if not bare or k not in _OUTER}
        function = given | {"arguments": {} if arguments is None else arguments}
        outer = {k: v for k, v in call.items() if k == "function" or (k in _OUTER and isinstance(v, str))}
        return ({} if "type" in outer else {"type": "function"}) | outer | {"function": function}


def check_media(value: object, what: str, where: str) -> None:
    """Refuses a row with images, audio or video. The model would be trained on an answer to something it never saw."""
    held = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    if any(each is not None and not (isinstance(each, str | bytes | list | dict) and not each) for each in held):
        raise media_refusal(what, where)


def check_turn_media(turn: Mapping[str, Any], place: int) -> None:
    for name in (name for name in turn if normal(name) in MEDIA):
        check_media(turn[name], MEDIA[normal(name)], f"message {place} has {quoted(name)}")


def media_refusal(what: str, where: str) -> Refusal:
    return Refusal(f"{what} (only text is supported)", where)


def role_of(turn: object) -> str:
    """The role of a turn as the data has it; a call is the assistant's. Empty: none that is known."""
    speaker = turn.get("role") or turn.get("from") if isinstance(turn, dict) else None
    role = ROLES.get(str(speaker).strip().lower(), "")
    return "assistant" if role == "call" else role


def unknown_role(role: str, place: int) -> Refusal:
    """A role that is not known, with the known one that is spelt most alike."""
    known = difflib.get_close_matches(role.strip().lower(), ROLES, n=1, cutoff=0.5)
    advice = f"did you mean {known[0]!r}?" if known else "known are system, user, assistant and tool"
    return Refusal("unknown role", f"message {place} has the role {quoted(role)}; {advice}")


def parsed(value: Any, where: str) -> Any:
    """Parses a text as JSON; returns any other value unchanged. `where` is for messages."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except RecursionError:
        raise Refusal("broken JSON", f"{where} (nested too deeply)") from None
    except ValueError:
        raise Refusal("broken JSON", where) from None


def check_depth(value: object, where: str) -> None:
    """Refuses what is nested so deeply that rendering it would end in a recursion error."""
    if is_deep(value):
        raise Refusal("nested too deeply", f"{where}, over {DEEPEST} levels")


def _content(place: int, content: object) -> str | None:
    """Text, OpenAI's list of text parts joined, or None."""
    if isinstance(content, str):
        return as_unicode(content)
    if content is None:
        return None
    if isinstance(content, list):
        return as_unicode("".join(_part(place, part) for part in content))
    raise Refusal("wrong type", f"the content of message {place} must be text, is {type_name(content)}")


def _part(place: int, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        kind = part.get("type", "text")
        text = part.get("refusal") if kind == "refusal" else part.get("text")
        if kind in (*_TEXT_PARTS, "refusal") and isinstance(text, str):
            return text
        named = str(kind) if "type" in part else " ".join(map(str, part))
        media = next((media for media in _MEDIA if media in named.lower()), None)
        if media is not None:
            raise media_refusal(MEDIA[media], f"message {place} has a part of the type {quoted(named)}")
        raise Refusal("wrong type", f"message {place} has content that is not text ({quoted(kind)})")
    raise Refusal("wrong type", f"message {place} has content that is not text")


def _flag(place: int, turn: Message) -> tuple[bool | None, float]:
    """(whether the turn says that it is trained, None if it does not say; the weight of its tokens). OpenAI's weight 0
    makes a turn context, not trained; 1 trains it like any other; every other weight multiplies the loss."""
    train, given = turn.get("train"), turn.get("weight")
    weight = 1.0 if given is None else checked_weight(given, f"'weight' of message {place}")
    if train is not None:
        if not isinstance(train, bool):
            raise Refusal("wrong type", f"'train' of message {place} must be true or false")
        if train and not weight:
            raise Refusal("wrong type", f"message {place} has 'train': true and 'weight': 0")
        return train, weight or 1.0
    return (None if given is None else weight > 0), weight or 1.0


def as_unicode(text: str) -> str:
    """Returns the text; raises Refusal for a lone surrogate, which JSON can escape and no tokenizer can encode."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Refusal("not Unicode text", f"a lone surrogate at character {error.start + 1}") from None
    return text
