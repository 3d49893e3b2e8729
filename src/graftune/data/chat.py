"""Records -> texts with the spans that are trained, in characters.

The response mask comes from rendering prefixes of the conversation, never from searching the text for markers. For the
assistant turn i:

    prompt = render(messages[:i], with the generation prompt)     what inference will have before it answers
    full   = render(messages[:i+1])                               the same conversation, answered
    span   = full[len(prompt) : the end of the end-of-turn token]

What stands in the contents, marker strings included, cannot move these boundaries. Turns are kept in one text where the
whole conversation's rendering starts with each turn's own (then every turn sees just what inference would show it).
Where a template rewrites history (Qwen3 drops old reasoning), or EOS had to be added that inference's history will not
have, each assistant turn becomes a text of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graftune.data.record import Message, Record
from graftune.data.source import Refusal
from graftune.data.template import ANSWERS, ChatFormat, shared_start
from graftune.tokenizer import Tokenizer


@dataclass(frozen=True)
class Passage:
    """One example before tokenising. `messages` and `trained` are what it was rendered from, for cutting it shorter."""

    text: str
    spans: tuple[tuple[int, int], ...]
    messages: list[Message]
    trained: tuple[int, ...]
    reference: str
    tools: list[Any] | None = None

    @property
    def prompt(self) -> str:
        """The text a model continues to give the last trained answer."""
        return self.text[: self.spans[-1][0]]

    @property
    def asked(self) -> list[Message]:
        """The messages before the last trained answer."""
        return self.messages[: self.trained[-1]]


@dataclass(frozen=True)
class _Turn:
    """One trained turn, rendered as the last of its conversation. `honest`: the generation prompt is a prefix of it."""

    text: str  # ends with the end token
    start: int
    honest: bool


def said(message: Message) -> str:
    """A message's text; beside tool calls it may have none."""
    return message["content"] or ""


def trained_turns(record: Record, train_on: str) -> tuple[int, ...]:
    """Indices of the messages to train; raises Refusal where there is none."""
    turns = [i for i, message in enumerate(record.messages) if message["role"] == "assistant"]
    if train_on == "last":
        return (turns[-1],)
    if train_on == "flagged" and record.kind in ("messages", "conversations"):
        wrong = [i for i, flag in enumerate(record.flags) if flag and i not in turns]
        if wrong:
            raise Refusal("a flag on a turn that is not the assistant's", f"message {wrong[0] + 1}")
        turns = [i for i in turns if record.flags[i]]
        if not turns:
            raise Refusal("nothing to train", 'no assistant turn has "train": true or "weight": 1')
    return tuple(turns)


def passages(
    form: ChatFormat, tokenizer: Tokenizer, messages: list[Message], tools: list[Any] | None, trained: Sequence[int]
) -> list[Passage]:
    """The texts that train `trained`, one where the template allows it."""
    messages = messages[: trained[-1] + 1]
    turns = [_turn(form, tokenizer, messages[: i + 1], tools) for i in trained]
    whole = turns[-1].text
    joint = len(turns) == 1 or (not form.append and all(turn.honest and whole.startswith(turn.text) for turn in turns))
    if joint:
        spans = tuple((turn.start, len(turn.text)) for turn in turns)
        return [Passage(whole, spans, messages, tuple(trained), said(messages[-1]).strip(), tools)]
    return [
        Passage(
            turn.text,
            ((turn.start, len(turn.text)),),
            messages[: i + 1],
            (i,),
            said(messages[i]).strip(),
            tools,
        )
        for i, turn in zip(trained, turns, strict=True)
    ]


def _turn(form: ChatFormat, tokenizer: Tokenizer, messages: list[Message], tools: list[Any] | None) -> _Turn:
    """The last message as a trained turn."""
    prompt = form.render(messages[:-1], tools, generate=True)
    full = form.render(messages, tools)
    honest = full.startswith(prompt)
    start = len(prompt) if honest else _content_start(form, messages, tools, full)
    body_end, end = _ends(form, tokenizer, full)
    if not full[start:body_end].strip():
        raise Refusal("refused by the chat template", "it renders nothing for an assistant turn")
    return _Turn(full[:end] + form.append, start, honest)


def _content_start(form: ChatFormat, messages: list[Message], tools: list[Any] | None, full: str) -> int:
    """Where the answer starts when the generation prompt is no prefix: two probe answers part at their first letter."""
    probes = [form.render([*messages[:-1], {"role": "assistant", "content": answer}], tools) for answer in ANSWERS]
    return len(shared_start(*probes, full))


def _ends(form: ChatFormat, tokenizer: Tokenizer, full: str) -> tuple[int, int]:
    """Where the last turn's content ends, and where its end token does."""
    if full.endswith(form.suffix):
        body = len(full) - len(form.suffix)
        return body, body + len(form.end)
    # A turn that closes otherwise than the probe did (tool calls, in some templates): it must close with a stop token.
    text = full.rstrip()
    ids, offsets = tokenizer.encode_with_offsets(text)
    if not ids or ids[-1] not in tokenizer.stop_ids:
        raise Refusal("no end token", "the template does not close this assistant turn with one")
    return offsets[-1][0], len(text)


def check_roles(form: ChatFormat, record: Record, messages: list[Message]) -> None:
    """Refuses what a template would leave out without a word: tool calls, and roles it does not know."""
    for i, message in enumerate(messages):
        if message.get("tool_calls"):
            bare = {**message, "content": message["content"] or "-"}
            with_calls = form.render([*messages[:i], bare], record.tools)
            del bare["tool_calls"]
            if with_calls == form.render([*messages[:i], bare], record.tools):
                raise Refusal("refused by the chat template", "it does not render tool calls")
        elif message["role"] not in ("system", "user", "assistant"):
            shown = form.render(messages[: i + 1], record.tools)
            if shown == form.render([*messages[:i], {**message, "content": said(message) + "?"}], record.tools):
                raise Refusal("refused by the chat template", f"it does not render the role {message['role']!r}")
