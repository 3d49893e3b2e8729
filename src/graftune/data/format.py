"""A chat template, with the facts that are needed to train on the text it renders.

`ChatFormat` holds what probing found out (probe.py): how an answer ends, whether system turns, tool calls and
reasoning are rendered, and in which form the template wants them. It renders conversations in that form.

No BOS is added to rendered text: the model sees at inference what the template renders, with BOS if the template writes
one. The plain format (`template: none`, and models without a template) renders BOS where the tokenizer asks for one.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from graftune.data.row import Refusal
from graftune.data.tags import TAG, is_pair
from graftune.data.turns import ROLES, Message, unknown_role
from graftune.errors import GraftuneError
from graftune.tokenizer import Tokenizer

LONGEST_CONVERSATION = 4 << 20  # characters; a longer conversation is refused without rendering it
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
TrainedReasoning = Literal["all", "none", "not_empty"]
TrainReasoning = Literal["auto", "all", "none", "not_empty"]
EMPTY_NOT_TRAINED = (
    "train_reasoning auto: not_empty, since the template writes an empty reasoning block before answers that have none"
)
EVERYTHING_TRAINED = "train_reasoning auto: all, since the template writes no empty reasoning block"
LONGEST_TAG = 256  # characters of a reasoning tag with the text beside it


class Renderer(Protocol):
    def render(
        self,
        messages: list[Message],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
        **more: Any,
    ) -> str: ...


class PlainTemplate:
    """Prompt ++ response, with EOS after each answer. Turns before an answer are kept apart by a line break.

    `between` stands between a prompt and its answer where the prompt does not end with a blank itself."""

    def __init__(self, tokenizer: Tokenizer, between: str = ""):
        if not tokenizer.eos_token:
            raise GraftuneError(
                "the tokenizer has no EOS token to end a response with",
                fix="give a chat template that has an end token",
            )
        self.bos = (tokenizer.bos_token or "") if tokenizer.add_bos else ""
        self.eos, self.between = tokenizer.eos_token, between

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
        **more: Any,
    ) -> str:
        parts = [self.bos]
        for place, message in enumerate(messages):
            if message.get("tool_calls") or message["role"] not in ("system", "user", "assistant"):
                raise GraftuneError("plain text has no tool calls and no roles beyond system, user and assistant")
            if message["role"] == "assistant":
                parts.append((message["content"] or "") + self.eos)
            else:
                before_another = place + 1 < len(messages) and messages[place + 1]["role"] != "assistant"
                between = self.between if message["content"][-1:].strip() else ""
                parts.append(message["content"] + ("\n" if before_another else between))
        return "".join(parts)


@dataclass(frozen=True)
class Reasoning:
    """How a template writes reasoning before an answer: the field it reads, and the text before and after it."""

    key: str = ""  # empty: the template renders no such field
    open: str = "<think>\n"
    close: str = "\n</think>\n\n"  # empty: how a block is closed is unknown
    part: bool = False  # the template reads it as a part of the content, as Ministral 3's does
    channel: bool = False  # a message of its own, as in harmony: it is closed by the header that every prompt ends with

    def block(self, answer: str, *, opened: bool) -> tuple[int, bool]:
        """(where the reasoning at the start of `answer` ends, whether it is blank); (0, False) if there is none.

        `opened`: the prompt has opened the block already."""
        close = self.close.strip()
        begin = 0
        if not opened:
            begin = len(answer) - len(answer.lstrip())
            size = self.opening(answer[begin : begin + LONGEST_TAG])
            if not size:
                return 0, False
            begin += size
        found = answer.find(close, begin) if close else -1
        if found < 0:
            return 0, False
        end = found + len(close)
        blank = len(answer[end:]) - len(answer[end:].lstrip())
        return end + blank, not answer[begin:found].strip()

    def opening(self, text: str) -> int:
        """The length of the opening tag that `text` starts with: the template's own, or another one that pairs with the
        closing tag. 0 if there is none."""
        tag = self.open.strip()
        if tag and text.startswith(tag):
            return len(tag)
        found, close = TAG.match(text), TAG.search(self.close)
        return found.end() if found and close and is_pair(found[0], close[0]) else 0

    def inline(self, content: str) -> tuple[str, str]:
        """Reasoning that is written in the content itself, and the rest: "<think>why</think>answer"."""
        end, _ = self.block(content, opened=False)
        if not end:
            return "", content
        begin = content.lstrip()
        inner = begin[self.opening(begin) :]
        return inner[: inner.index(self.close.strip())].strip("\n"), content[end:]

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends with an open block."""
        return bool(self.tags[0]) and prompt[-LONGEST_TAG:].rstrip().endswith(self.tags[0])

    def closed_by(self, prompt: str) -> bool:
        """Whether the prompt ends with a block that it has closed."""
        return bool(self.tags[1]) and not self.channel and prompt[-LONGEST_TAG:].rstrip().endswith(self.tags[1])

    @functools.cached_property
    def tags(self) -> tuple[str, str]:
        """The opening and the closing tag, without blanks."""
        return self.open.strip(), self.close.strip()

    def in_message(self, message: Message) -> tuple[str, str]:
        """(reasoning, the rest of the content) of an assistant message, wherever it was written."""
        for key in REASONING_KEYS:
            if isinstance(message.get(key), str) and message[key].strip():
                return message[key], message["content"] or ""
        return self.inline(message["content"] or "")


@dataclass(frozen=True)
class ChatFormat:
    """A template and what was found by probing it."""

    renderer: Renderer
    name: str
    suffix: str  # constant text after an assistant turn's content, e.g. "<|im_end|>\n"
    end: str  # the part of it that is trained, e.g. "<|im_end|>"
    end_id: int | None  # the token `end` closes with; None where it is ordinary text
    append: str = ""  # EOS text to put after a turn that has no end of its own
    call_append: str = ""  # the same for a turn of tool calls; empty: like `append`
    takes_system: bool = True
    notes: tuple[str, ...] = ()
    call_suffix: str = ""  # `suffix` of a turn of tool calls, from its end token on; empty: like `suffix`
    call_end: str = ""
    renders_tools: bool = False
    renders_calls: bool = False
    arguments: str = "object"  # what the template wants a tool call's arguments as: "object", or JSON "text"
    null_content: str | None = None  # what stands for `content: null`: None where the template knows it
    blank_content: str | None = ""  # what stands for an empty content beside tool calls
    parts: bool = False  # the template reads contents as lists of parts only
    reasoning: Reasoning = field(default_factory=Reasoning)
    empty_reasoning: bool = False  # the template writes an empty block before an answer without reasoning
    before: str = ""  # what the template puts between a prompt and an answer without reasoning
    header: str = ""  # the texts between question and answer, of the generation prompt and of the rendering, joined
    control: tuple[str, ...] = ()  # names of the tokenizer's control tokens, the longest first
    variables: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def closing(self) -> str:
        """The control token (or the text) that closes every answer, without words of the template before it."""
        return self.append or next(filter(self.end.endswith, self.control), self.end)

    def render(self, messages: list[Message], tools: list[Any] | None, *, generate: bool = False) -> str:
        """Renders the messages; an error of the template becomes the row's Refusal.

        If the template takes no system turn, the system text is put before the first user turn's text only here, so
        that code that shortens a conversation sees two separate turns."""
        if not self.takes_system and messages and messages[0]["role"] == "system":
            messages = _merged(messages)
        special, size = False, len(str(tools)) if tools else 0
        for message in messages:
            # Most messages have only a role and a text, which the first test finds without comparing keys.
            if (len(message) > 2 or message["content"] is None) and _is_special(message):
                special = True
                size += len(str(message))
            else:
                size += len(message["content"])
        if size > LONGEST_CONVERSATION:
            raise Refusal("too long to render", f"the conversation has {size} characters")
        if self.parts or special:
            messages = [self._as_wanted(message) for message in messages]
        try:
            return self.renderer.render(messages, tools=tools, add_generation_prompt=generate, **self.variables)
        except GraftuneError as error:
            raise Refusal("refused by the chat template", error.what) from None

    def trained_reasoning(self, asked: TrainReasoning) -> tuple[TrainedReasoning, str]:
        """`train_reasoning` with auto resolved, and a line for the user where auto decided something."""
        if asked != "auto":
            return asked, ""
        if self.empty_reasoning:
            return "not_empty", EMPTY_NOT_TRAINED
        return "all", EVERYTHING_TRAINED if self.reasoning.key else ""

    def _as_wanted(self, message: Message) -> Message:
        """The message with null content, arguments and reasoning in the form that the template reads."""
        wanted = dict(message)
        if wanted["content"] is None:
            wanted["content"] = self.null_content
        elif wanted["content"] == "" and wanted.get("tool_calls"):
            wanted["content"] = self.blank_content
        if wanted.get("tool_calls"):
            wanted["tool_calls"] = [_call_as(self.arguments, call) for call in wanted["tool_calls"]]
        if self.reasoning.key and self.reasoning.key not in wanted:
            found = next((key for key in REASONING_KEYS if key in wanted), None)
            if found:
                wanted[self.reasoning.key] = wanted.pop(found)
        found = next((key for key in REASONING_KEYS if key in wanted), "") if self.reasoning.part else ""
        if (self.parts or found) and isinstance(wanted["content"], str):
            wanted["content"] = in_parts(wanted["content"])
        if found:
            wanted["content"] = [*thinking_parts(wanted.pop(found)), *(wanted["content"] or ())]
        return wanted


def in_parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def thinking_parts(reasoning: str) -> list[dict[str, str]]:
    return [{"type": "thinking", "thinking": reasoning}]


def _is_special(message: Message) -> bool:
    return "tool_calls" in message or message["content"] is None or not message.keys().isdisjoint(REASONING_KEYS)


def _call_as(form: str, call: Any) -> Any:
    holder = call.get("function", call)
    if not isinstance(holder, dict) or "arguments" not in holder:
        return call
    arguments = holder["arguments"]
    if form == "text" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    holder = {**holder, "arguments": arguments}
    return {**call, "function": holder} if "function" in call else holder


def _merged(messages: list[Message]) -> list[Message]:
    if not (messages[0]["content"] or "").strip():
        return messages[1:]
    if len(messages) < 2 or messages[1]["role"] != "user":
        raise Refusal("system turn that the template does not take", "and no user turn follows to merge it into")
    first = {**messages[1], "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
    return [first, *messages[2:]]


def stop_ids(tokenizer: Tokenizer, form: ChatFormat | None) -> tuple[int, ...]:
    """The ids that end an answer: the model's own end tokens and the one that the template closes a turn with."""
    ends = () if form is None or form.end_id is None else (form.end_id,)
    return tuple(sorted({*tokenizer.stop_ids, *ends}))


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Names of the control tokens by id. Only their parsed names encode to these ids, never ordinary text."""
    return {i: token.content for i, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}


def special_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches any control token's name typed in a text, the longest first."""
    names = sorted(special_tokens(tokenizer).values(), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


def check_roles(form: ChatFormat, messages: list[Message], tools: list[Any] | None) -> None:
    """Refuse tool calls and unknown roles, which a template would silently leave out. Only the first message of each
    role is checked; `not_rendered` reports what is missing of the others."""
    seen = {"system", "user", "assistant"}
    for i, message in enumerate(messages):
        if message.get("tool_calls"):
            if not form.renders_calls:
                raise Refusal("refused by the chat template", "it does not render tool calls")
        elif message["role"] not in seen:
            seen.add(message["role"])
            check_role(form, message["role"], i + 1)
            shown = form.render(messages[: i + 1], tools)
            marked = {**message, "content": (message["content"] or "") + "?"}
            if shown == form.render([*messages[:i], marked], tools):
                raise Refusal("refused by the chat template", f"it does not render the role {message['role']!r}")


def check_role(form: ChatFormat, role: str, place: int) -> None:
    """Refuse a role of message `place` that is misspelt: neither a usual one nor one that the template names."""
    if role not in ("system", "user", "assistant", "tool") and not names_role(form, role):
        raise unknown_role(role, place)


def names_role(form: ChatFormat, role: str) -> bool:
    source = getattr(form.renderer, "source", "")
    return f"'{role}'" in source or f'"{role}"' in source


def with_known_roles(form: ChatFormat, messages: list[Message]) -> list[Message]:
    """The messages with other tools' names of roles replaced, as in data; raises Refusal for an unknown role."""
    made = []
    for place, message in enumerate(messages, 1):
        role: str = message["role"]
        if not names_role(form, role):
            role = ROLES.get(role.strip().lower(), role)
            check_role(form, role, place)
        made.append(message if role == message["role"] else {**message, "role": role})
    return made
