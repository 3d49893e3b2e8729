"""Compares what we train of a conversation with the generation marks of a training template that TRL ships.

TRL keeps a model's own template (NAME.jinja) beside one with {% generation %} marks (NAME_training.jinja). Ours is
rendered from the model's own. Where the two differ, a policy of ours that docs/data.md states must explain it exactly:
the marks, changed by the policies that apply, are the tokens that we train.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from graftune.data.row_encoder import RowEncoder
from graftune.settings.sections import DataConfig
from tests.data.generated import Message
from tests.data.template_judge import encode, opened, reference

FOLDER = "GRAFTUNE_TRAINING_TEMPLATES"
CONTROL = re.compile(r"<\|[^<>\s'\"{}|]{1,40}\|?>|<[^<>\s'\"{}|/]{1,40}\|>|<\uff5c[^<>\uff5c\s]{1,40}\uff5c>|"
                     r"<(?:start_of_turn|end_of_turn|sop|s|/s|eot|bot)>|\[/?[A-Z_]{3,30}\]")  # fmt: skip
OPEN, CLOSE = "<think>\n", "\n</think>\n\n"
# Each policy is a row of a table in docs/data.md.
END = "the end token closes what is trained"
PROMPT = "what the inference prompt gives is not trained"
EMPTY = "an empty reasoning block is not trained"
CLOSED = "reasoning is left out after a closed block"
LAST = "each answer is trained as the last one of its conversation"
POLICIES = (END, PROMPT, EMPTY, CLOSED, LAST)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather in a city.", "parameters": CITY},
}


class Compared(NamedTuple):
    turns: int
    policies: set[str]  # that explain a difference
    fault: str = ""


def folder() -> Path | None:
    """The folder of TRL's templates: that of the environment variable, or of an installed TRL."""
    if given := os.environ.get(FOLDER):
        return Path(given)
    found = importlib.util.find_spec("trl")
    inside = Path(found.origin).parent / "chat_templates" if found and found.origin else None
    return inside if inside and inside.is_dir() else None


def conversations() -> Iterator[tuple[str, list[Message], list[Any] | None]]:
    """Twelve, each with and without reasoning, tools or a system turn where that matters."""

    def bot(content: str | None, why: str = "", *cities: str) -> Message:
        calls = [
            {"id": f"call{i:05}", "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
            for i, city in enumerate(cities)
        ]
        beside = {"reasoning_content": why, "tool_calls": calls}
        return {"role": "assistant", "content": content} | {key: value for key, value in beside.items() if value}

    def user(text: str) -> Message:
        return {"role": "user", "content": text}

    def result(text: str, call: int = 0) -> Message:
        return {"role": "tool", "name": "weather", "tool_call_id": f"call{call:05}", "content": text}

    system, ask, more = {"role": "system", "content": "Be brief."}, user("And in Oslo?"), user("Thanks. And Rome?")
    yield "single", [ask, bot("Cold.")], None
    yield "single, reasoning", [ask, bot("Cold.", "It is winter.")], None
    yield "system", [system, ask, bot("Cold.\n\nVery.")], None
    yield "two turns", [ask, bot("Cold."), more, bot("Mild.")], None
    yield "three turns, system, reasoning", [
        system, ask, bot("Cold.", "Winter."), more, bot("Mild.", "South."), user("Why?"), bot("Sea.", "Hm.\n\nSea."),
    ], None  # fmt: skip
    yield "two turns, reasoning in the last", [ask, bot("Cold."), more, bot("Mild.", "South.")], None
    yield "two turns, reasoning in the first", [ask, bot("Cold.", "Winter."), more, bot("Mild.")], None
    yield "call", [ask, bot(None, "", "Oslo"), result("-3"), bot("Cold.")], [TOOL]
    yield "call, reasoning", [ask, bot(None, "I look.", "Oslo"), result("-3"), bot("Cold.", "Below 0.")], [TOOL]
    yield "two calls", [
        system, ask, bot("", "", "Oslo", "Rome"), result("-3"), result("14", 1), bot("Rome is warmer."),
    ], [TOOL]  # fmt: skip
    yield "text beside a call", [ask, bot("I look.", "", "Oslo"), result("-3"), bot("Cold.")], [TOOL]
    yield "call, then another turn", [
        ask, bot(None, "I look.", "Oslo"), result("-3"), bot("Cold.", "Below 0."), more, bot("Mild.", "South."),
    ], [TOOL]  # fmt: skip


def encoder_of(source: str, variables: dict[str, Any], stops: tuple[str, ...] = ()) -> RowEncoder:
    """With the default settings of a run. `stops`: the model's end tokens, where the template names none of its own."""
    names = tuple(sorted(set(CONTROL.findall(source))))
    made = opened(source, names)
    if stops:
        made = dataclasses.replace(made, stop_ids=tuple(made.backend.token_to_id(stop) for stop in stops))
    return RowEncoder(made, DataConfig(max_seq_len=1 << 16, template_vars=variables), "data")


def compare(
    encoder: RowEncoder,
    training: str,
    messages: list[Message],
    tools: Any,
    variables: dict[str, Any],
    tags: tuple[str, str] = (OPEN, CLOSE),
) -> Compared:
    """`tags`: what the template writes around reasoning."""
    assert encoder.tokenizer.template is not None
    source, policies = encoder.tokenizer.template.source, set[str]()
    found = encode(encoder, messages, tools)
    if found.refusal:
        return Compared(0, policies, f"refused: {found.refusal}")
    messages = as_read(source, messages)
    marked, answers = marks(training, messages, tools, variables), [i for i, m in enumerate(messages) if _is_answer(m)]
    if len(found.runs) != len(marked) or len(marked) != len(answers):
        return Compared(0, policies, f"{len(found.runs)} trained, {len(marked)} marked, {len(answers)} answers")
    for run, mark, i in zip(found.runs, marked, answers, strict=True):
        prompt = reference(source, messages[:i], tools, True, **variables) or ""
        if (last := marks(training, messages[: i + 1], tools, variables)[-1]) != mark:
            mark = last
            policies.add(LAST)
        block, wanted, used = explained(mark, prompt, tags)
        policies |= used
        if run.before != prompt + block or run.text != wanted:
            return Compared(len(marked), policies, f"{prompt[-80:]!r}\n  {run!r}\n  not {wanted!r} of {mark!r}")
    return Compared(len(marked), policies)


def as_read(source: str, messages: list[Message]) -> list[Message]:
    """The messages with the field of reasoning that the template reads, and without null contents where it cannot."""
    if "visible_text(m.content)" in source:  # writes None for a null content
        return [message | {"content": message["content"] or ""} for message in messages]
    if '"thinking" in message' not in source:
        return messages
    found = [{"thinking" if key == "reasoning_content" else key: value for key, value in m.items()} for m in messages]
    return [message | {"content": message["content"] or ""} for message in found]


def marks(training: str, messages: list[Message], tools: Any, variables: dict[str, Any]) -> list[str]:
    """The texts that the training template marks, one for each answer."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, places = render_jinja_template(
        [messages], tools=tools, chat_template=training, return_assistant_tokens_mask=True, bos_token="<s>",
        eos_token="</s>", **variables,
    )  # fmt: skip
    return [texts[0][start:end] for start, end in places[0]]


def explained(mark: str, prompt: str, tags: tuple[str, str] = (OPEN, CLOSE)) -> tuple[str, str, set[str]]:
    """What our policies make of a mark after a prompt: an empty block that is not trained, what is trained, and which
    policies changed the mark."""
    (open, close), wanted, used, untrained = tags, mark.rstrip("\n"), set[str](), ""
    if wanted != mark:
        used.add(END)
    if prompt.endswith(open + close) and wanted.startswith(open):
        reasoning, wanted = wanted.removeprefix(open).split(close.lstrip("\n"), 1)
        used.add(CLOSED if reasoning.strip() else PROMPT)
    given = next((n for n in range(min(len(wanted), len(prompt)), 0, -1) if prompt.endswith(wanted[:n])), 0)
    if given:
        wanted = wanted[given:]
        used.add(PROMPT)
    for block in (open + close, close):
        if wanted.startswith(block):
            answer = wanted.removeprefix(block).lstrip("\n")
            untrained, wanted = wanted.removesuffix(answer), answer
            used.add(EMPTY)
    return untrained, wanted, used


def _is_answer(message: Message) -> bool:
    return bool(message["role"] == "assistant")
