"""What a chat template does, found out by asking it.

A template is a program; reading its source for marker strings goes wrong with the next model. So it is rendered a few
times, once per run, with probe texts of our own, and the answers are kept: what constant text it writes after an
assistant turn, which part of that ends the turn (the end-of-turn token and nothing after it), and whether it takes a
system turn. A template that writes nothing there that could end a turn is refused by name, since a model trained with
it never learns to stop; `append_eos` adds the tokenizer's EOS instead.

BOS is the template's business: what it renders is what the model sees at inference, so none is added to it. The plain
format (`template: none`, and models without a template) renders BOS itself where the tokenizer asks for one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from graftune.config import DataConfig
from graftune.data.record import Message
from graftune.data.source import Refusal
from graftune.errors import GraftuneError
from graftune.tokenizer import ChatTemplate, Tokenizer
from graftune.tokenizer.template import Unbounded

# The probes differ in their first and in their last character, so that what two renderings share stops at the content.
ANSWERS = ("Ax", "By")
_ASK, _SYSTEM = "Zq ask", "Zq system"


class Renderer(Protocol):
    def render(
        self, messages: list[Message], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> str: ...


class PlainTemplate:
    """Prompt ++ response, with EOS after each answer. Turns before an answer are kept apart by a line break."""

    def __init__(self, tokenizer: Tokenizer):
        if not tokenizer.eos_token:
            raise GraftuneError(
                "the tokenizer has no EOS token to end a response with",
                mend="give a chat template that has an end token",
            )
        self.bos = (tokenizer.bos_token or "") if tokenizer.add_bos else ""
        self.eos = tokenizer.eos_token

    def render(
        self, messages: list[Message], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        parts = [self.bos]
        for place, message in enumerate(messages):
            if message.get("tool_calls") or message["role"] not in ("system", "user", "assistant"):
                raise GraftuneError("plain text has no tool calls and no roles beyond system, user and assistant")
            if message["role"] == "assistant":
                parts.append((message["content"] or "") + self.eos)
            else:
                before_another = place + 1 < len(messages) and messages[place + 1]["role"] != "assistant"
                parts.append(message["content"] + ("\n" if before_another else ""))
        return "".join(parts)


@dataclass(frozen=True)
class ChatFormat:
    """A template and what probing told about it."""

    renderer: Renderer
    name: str
    suffix: str  # constant text after an assistant turn's content, e.g. "<|im_end|>\n"
    end: str  # the part of it that is trained, e.g. "<|im_end|>"
    end_id: int | None  # the token `end` closes with; None where it is ordinary text
    append: str  # EOS text to put after a turn that has no end of its own
    takes_system: bool
    notes: tuple[str, ...] = ()

    def render(self, messages: list[Message], tools: list[Any] | None, *, generate: bool = False) -> str:
        """The template's rendering; its own objections become the row's refusal.

        For a template that takes no system turn, its text is put before the first user turn's, here, so that
        everything that shortens a conversation can treat the two as apart."""
        if not self.takes_system and messages and messages[0]["role"] == "system":
            messages = _merged(messages)
        try:
            return self.renderer.render(messages, tools=tools, add_generation_prompt=generate)
        except Unbounded:
            raise  # not of this row: each of the others would take as long
        except GraftuneError as error:
            raise Refusal("refused by the chat template", error.what) from None


def chat_format(tokenizer: Tokenizer, config: DataConfig) -> ChatFormat | None:
    """The format `config.template` asks for. None: the model has no template and none was chosen (chat data fails)."""
    if config.template == "none":
        return probe(PlainTemplate(tokenizer), "template: none", tokenizer, append_eos=False)
    if config.template == "auto":
        if tokenizer.template is None:
            return None
        name = getattr(tokenizer.template, "name", "chat template")
        return probe(tokenizer.template, name, tokenizer, append_eos=config.append_eos)
    return probe(
        template_from_file(config.template, tokenizer), config.template, tokenizer, append_eos=config.append_eos
    )


def stop_ids(tokenizer: Tokenizer, form: ChatFormat | None) -> tuple[int, ...]:
    """Where an answer ends: the model's own end tokens and the one the template closes a turn with."""
    ends = () if form is None or form.end_id is None else (form.end_id,)
    return tuple(sorted({*tokenizer.stop_ids, *ends}))


def plain_format(tokenizer: Tokenizer) -> ChatFormat:
    return probe(PlainTemplate(tokenizer), "plain prompt and response", tokenizer, append_eos=False)


def template_from_file(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    try:
        source = Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise GraftuneError(
            f"the chat template cannot be read ({why})", where=name, mend="template is auto, none or a Jinja file"
        ) from None
    return ChatTemplate(
        source, bos_token=tokenizer.bos_token or "", eos_token=tokenizer.eos_token or "", name=Path(name).name
    )


def probe(renderer: Renderer, name: str, tokenizer: Tokenizer, *, append_eos: bool) -> ChatFormat:
    def answered(answer: str, system: list[Message]) -> str:
        turns = [{"role": "user", "content": _ASK}, {"role": "assistant", "content": answer}]
        return renderer.render(system + turns)

    system = [{"role": "system", "content": _SYSTEM}]
    try:
        first, second = (answered(answer, []) for answer in ANSWERS)
    except Unbounded:
        raise
    except GraftuneError as error:
        try:
            first, second = (answered(answer, system) for answer in ANSWERS)
        except GraftuneError:
            raise GraftuneError(
                f"cannot render a question and an answer ({error.what})",
                where=name,
                mend="give another template with `template: FILE`, or `template: none`",
            ) from None
    # Some templates strip content or put a space before it: neither touches what follows it.
    suffix = shared_start(first[::-1], second[::-1])[::-1]
    if ANSWERS[0] not in first:
        raise GraftuneError("leaves out the assistant's answer", where=name, mend="give another template")
    end, end_id = _turn_end(suffix, tokenizer)
    notes = []
    append = ""
    if end_id is None and append_eos:
        if not tokenizer.eos_token:
            raise GraftuneError("append_eos: the tokenizer has no EOS token", where=name, mend="use another template")
        append, end_id = tokenizer.eos_token, tokenizer.eos_id
    elif not end:
        raise GraftuneError(
            "has no token that ends an answer, so the model would never learn to stop",
            where=name,
            mend="set append_eos to add EOS after each answer, or give another template",
        )
    elif end_id is None:
        notes.append(f"the template ends an answer with {end!r}, which is ordinary text to this tokenizer")
    elif end_id not in tokenizer.stop_ids:
        notes.append(f"the template ends an answer with {end!r}, which is not one of the model's own end tokens")
    return ChatFormat(renderer, name, suffix, end, end_id, append, _takes_system(renderer), tuple(notes))


def shared_start(*texts: str) -> str:
    """The longest text that all of them start with."""
    low, high = min(texts), max(texts)  # whatever lies between these two in order shares what they share
    for place, letter in enumerate(low):
        if letter != high[place]:
            return low[:place]
    return low


def _merged(messages: list[Message]) -> list[Message]:
    if len(messages) < 2 or messages[1]["role"] != "user":
        raise Refusal("system turn that the template does not take", "and no user turn follows to merge it into")
    first = {**messages[1], "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
    return [first, *messages[2:]]


def _turn_end(suffix: str, tokenizer: Tokenizer) -> tuple[str, int | None]:
    """The suffix up to its first stop token, else up to its first special token, else all of it that is not blank."""
    ids, offsets = tokenizer.encode_with_offsets(suffix) if suffix else ([], [])
    stops = [i for i, token in enumerate(ids) if token in tokenizer.stop_ids]
    if not stops:
        special = special_tokens(tokenizer)
        stops = [i for i, token in enumerate(ids) if token in special]
    if stops:
        return suffix[: offsets[stops[0]][1]], ids[stops[0]]
    return suffix.rstrip(), None


def _takes_system(renderer: Renderer) -> bool:
    try:
        shown = renderer.render(
            [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _ASK}], add_generation_prompt=True
        )
    except Unbounded:
        raise
    except GraftuneError:
        return False
    return _SYSTEM in shown


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Control tokens by id: those that only parsing their name gives, never ordinary text."""
    return {i: token.content for i, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}


def special_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches any control token's name typed in a text, the longest first."""
    names = sorted(special_tokens(tokenizer).values(), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None
