"""Judges what the package trains of one conversation under one chat template, against transformers' rendering.

The text before an answer must be the prompt that transformers renders; what is trained after it must be what the
template's description says (generated.py), or, for templates without one, what the rendering has after the prompt. A
text that differs from the rendering must come with a note. A refusal names its reason.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jinja2
import tokenizers

from graftune.batch import Example
from graftune.data.chat import HEADER_TRAINED, NO_REASONING
from graftune.data.missing import NOT_RENDERED
from graftune.data.row import Refusal
from graftune.data.row_encoder import RowEncoder
from graftune.data.tags import TAG
from graftune.settings.sections import DataConfig
from graftune.tokenizer import ChatTemplate, Tokenizer
from tests.data.generated import BEFORE, EXTRA_CONTROL, TAGS, Message, Spec
from tests.data.helpers import built_by, tokenizer

REASONING = ("reasoning_content", "reasoning", "thinking")  # the names under which records have it


class Verdict(NamedTuple):
    kind: str  # right | noted | refused | wrong | silent | needless
    detail: str = ""
    key: str = ""


class Trained(NamedTuple):
    before: str
    text: str


@functools.cache
def with_control(names: tuple[str, ...]) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tokenizer().backend.to_str())
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])
    return dataclasses.replace(tokenizer(), backend=backend)


def opened(source: str, names: tuple[str, ...] = EXTRA_CONTROL, **changes: Any) -> Tokenizer:
    base = with_control(names)
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", name="template")
    return dataclasses.replace(base, template=template, **changes)


def reference(source: str, messages: list[Message], tools: Any, generate: bool, **variables: Any) -> str | None:
    """transformers' rendering; None where the template refuses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=generate, bos_token="<s>",
            eos_token="</s>", **variables,
        )  # fmt: skip
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError):
        return None
    return texts[0]


def trained(example: Example, chat: Tokenizer) -> Iterator[Trained]:
    """Each run of trained tokens and the text before it."""
    tokens, flags = list(example.tokens), list(example.supervised)
    starts = [k for k in range(len(flags)) if flags[k] and (k == 0 or not flags[k - 1])]
    for start in starts:
        end = next((k for k in range(start, len(flags)) if not flags[k]), len(flags))
        yield Trained(chat.decode(tokens[:start]), chat.decode(tokens[start:end]))


class Encoded(NamedTuple):
    runs: list[Trained]
    notes: set[str]
    refusal: str = ""
    everything: str = ""
    said: str = ""  # every note: those about words of the template around answers excuse no other difference


def encode(encoder: RowEncoder, messages: list[Message], tools: Any) -> Encoded:
    row = {"messages": messages} | ({"tools": tools} if tools else {})
    counted = dict(encoder.summary.notes)
    try:
        made = built_by(encoder, row)
    except Refusal as refusal:
        return Encoded([], set(), str(refusal))
    runs = [run for one in made if one.example for run in trained(one.example, encoder.tokenizer)]
    everything = "".join(encoder.tokenizer.decode(list(one.example.tokens)) for one in made if one.example)
    notes = {note for one in made for note in one.notes}
    notes |= set(encoder.fitter.form.notes) if encoder.fitter else set()
    notes |= {note for note, count in encoder.summary.notes.items() if counted.get(note, 0) < count}
    others = {note for note in notes if not note.startswith("the template adds")}
    return Encoded(runs, others, "", everything, " ".join(notes))


def judge(spec: Spec, encoder: RowEncoder, name: str, messages: list[Message], tools: Any) -> Verdict:
    """One conversation of a generated template."""
    source = encoder.tokenizer.template.source  # type: ignore[union-attr]
    wanted = as_wanted(spec, messages)
    answered = [
        i for i, m in enumerate(messages)
        if m["role"] == "assistant" and m.get("weight") != 0 and ((m["content"] or "").strip() or m.get("tool_calls"))
        and any(before["role"] == "user" for before in messages[:i])
    ]  # fmt: skip
    if spec.calls == "none" and any(m.get("tool_calls") for m in messages):
        answered = []
    expected = [spec.answer(wanted[: at(wanted, messages, i) + 1]) for i in answered]
    found = encode(encoder, messages, tools)
    if found.refusal:
        unknown = not answered or any(pattern is None for pattern in expected) or spec.refuses(messages)
        return Verdict("refused" if unknown else "needless", found.refusal)
    if len(found.runs) != len(answered):  # turns that follow one another without a text between them
        text, patterns = "".join(run.text for run in found.runs), [p.pattern for p in expected if p is not None]
        if len(patterns) != len(answered) or not re.fullmatch("".join(patterns), text, re.DOTALL):
            return Verdict("wrong", f"{len(found.runs)} trained, not {len(answered)}: {found.runs}")
        found = found._replace(runs=found.runs[:0])
    for run, pattern, i in zip(found.runs, expected, answered, strict=False):
        prompt = reference(source, wanted[: at(wanted, messages, i)], tools, True)
        if prompt is None or run.before != prompt:
            return Verdict("wrong", f"prompt {run.before!r}\n  not    {prompt!r}")
        full = reference(source, wanted[: at(wanted, messages, i) + 1], tools, False) or ""
        # Where the author's own blanks complete the prompt's header, they are the prompt's.
        blanks = prompt[len(prompt.rstrip()) :] if full.startswith(prompt) else ""
        # A template may render a block beside reasoning in the content, or drop that: its own rendering is right.
        own = spec.block == "opens" and full.startswith(prompt) and TAGS[spec.tag][1].strip() in run.text
        if pattern is None or not (pattern.fullmatch(run.text) or pattern.fullmatch(blanks + run.text) or own):
            return Verdict("wrong", f"answer {run.text!r}\n  not    {pattern.pattern if pattern else None!r}")
        if not full.startswith(prompt + run.text) and not found.notes:
            return Verdict("silent", f"{prompt + run.text!r}\n  not    {full!r}")
    around = {words.strip() for i in answered for words in spec.words_around(wanted[: at(wanted, messages, i) + 1])}
    if HEADER_TRAINED in found.notes:
        around.discard(BEFORE.strip())
    if NOT_RENDERED["assistant"] in found.notes:
        around.clear()  # where an answer begins and ends there is not known
    if unsaid := [words for words in around if words not in found.said]:
        return Verdict("silent", f"nothing is said of {unsaid}")
    lost = set(re.findall(r"w\d+q\d+", str(messages))) - set(re.findall(r"w\d+q\d+", found.everything))
    if lost and not found.notes:
        return Verdict("silent", f"lost {lost}")
    return Verdict("noted" if found.notes else "right")


def at(wanted: list[Message], messages: list[Message], i: int) -> int:
    return i - (len(messages) - len(wanted))


def as_wanted(spec: Spec, messages: list[Message]) -> list[Message]:
    """As a user of transformers would give them: arguments and system turns in the form that the template takes."""
    made = [{k: v for k, v in message.items() if k != "weight"} for message in messages]
    for message in made:
        if spec.arguments == "text" and message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        why = next((message[key] for key in REASONING if key in message), None)
        if why is not None and spec.field != "none":
            message[spec.key] = why
    if spec.system == "refused" and made[0]["role"] == "system":
        joined = made[0]["content"] + "\n\n" if made[0]["content"].strip() else ""
        made = [{**made[1], "content": joined + made[1]["content"]}, *made[2:]]
    return made


def encoder_of(spec: Spec) -> RowEncoder:
    return RowEncoder(opened(spec.source()), DataConfig(max_seq_len=8192, train_reasoning="all"), "data")


def judge_public(encoder: RowEncoder, source: str, messages: list[Message], tools: Any) -> Verdict:
    """One conversation of a template without a description."""
    try:
        found = encode(encoder, messages, tools)
    except Exception as error:
        return Verdict("crash", repr(error), type(error).__name__)
    if found.refusal:
        return Verdict("refused", found.refusal, re.sub(r"w?\d+(q\d+)?", "", found.refusal)[:60])
    texts = {text for message in messages for text in _author_texts(message)}
    kind, before = "right", ""
    for run in found.runs:
        first = min((place for text in texts if (place := run.text.find(text)) >= 0), default=-1)
        before = run.text[: max(first, 0)]
        rendered = [
            full for full in _renderings(source, messages, tools) if full is not None and full.startswith(run.before)
        ]
        stripped = run.text.removesuffix("</s>")
        if NO_REASONING not in found.notes and (lost := _lost_tags(source, messages, tools, run)):
            return Verdict("wrong", f"after {run.before[-60:]!r}: {run.text!r} lacks {lost}", str(lost))
        if any(full.startswith(run.before + stripped) for full in rendered) and not found.notes:
            continue
        if before.strip() or first < 0:
            kind = "look" if found.notes else "silent"
            return Verdict(kind, f"after {run.before[-60:]!r}: {run.text!r}\n  {sorted(found.notes)}", before)
        if not found.notes:
            return Verdict("silent", f"{run.before[-60:]!r} {run.text!r} {[full[-200:] for full in rendered]}", "text")
        kind = "noted"
    return Verdict(kind, "", before)


def _lost_tags(source: str, messages: list[Message], tools: Any, run: Trained) -> set[str]:
    """Tags that the rendering has before the answer and neither the prompt nor the trained text has."""
    least: set[str] | None = None
    for full in _renderings(source, messages, tools):
        first = next((i for i in range(len(run.text)) if full and run.text[i:-40] and run.text[i:-40] in full), None)
        if full is None or first is None:
            continue
        place = full.rfind(run.text[first:-40])
        asked = max(
            (full.rfind(m["content"] or "\0", 0, place) for m in messages if m["role"] != "assistant"), default=0
        )
        lost = set(TAG.findall(full[max(asked, 0) : place])) - set(TAG.findall(run.before[-400:] + run.text))
        least = lost if least is None or len(lost) < len(least) else least
    return least or set()


def _author_texts(message: Message) -> Iterator[str]:
    if message["role"] != "assistant":
        return
    for key in ("content", *REASONING):
        if (message.get(key) or "").strip():
            yield message[key].strip()
            yield from (part for part in re.findall(r"w\d+q\d+", message[key]))
    for call in message.get("tool_calls") or ():
        yield call["function"]["name"]


def _renderings(source: str, messages: list[Message], tools: Any) -> Iterator[str | None]:
    """The conversation up to each answer, in the forms in which a user of transformers may give it: reasoning under
    the name that the template reads, too."""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for arguments, null, parts in itertools.product(("object", "text"), (None, ""), ("", "all", "assistant")):
            made = []
            for one in messages[: i + 1]:
                one = {k: v for k, v in one.items() if k != "weight"}
                why = next((one[key] for key in REASONING if key in one), "")
                one |= dict.fromkeys(REASONING, why) if why else {}
                if one.get("tool_calls"):
                    one["content"] = one["content"] or null
                    one["tool_calls"] = [_call_as(call, arguments) for call in one["tool_calls"]]
                if parts in ("all", one["role"]):
                    thinking = [{"type": "thinking", "thinking": why}] if why else []
                    some = one["content"] or one["role"] == "system"
                    text = [{"type": "text", "text": one["content"]}] if some else []
                    one["content"] = thinking + text or one["content"]
                made.append(one)
            yield reference(source, made, tools, False)
            yield reference(source, made, tools, True)


def _call_as(call: Message, arguments: str) -> Message:
    function = call["function"]
    given = json.dumps(function["arguments"]) if arguments == "text" else function["arguments"]
    return {**call, "function": {**function, "arguments": given}}
