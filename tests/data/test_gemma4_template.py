"""Gemma 4's way of writing a conversation: reasoning is a channel, which the prompt has closed already where thinking
is off; a call ends with the mark of the reply that it waits for, and the reply continues the same turn.

The template here has that form and is ours. Where TRL or its templates are there (test_training_templates.py), the
same is asked of each revision of the model's own that TRL ships: they differ in what the prompt closes and in which
reasoning they render, so that the prompt is the judge's rendering."""

from __future__ import annotations

from typing import Any

import pytest

from graftune.data.row_encoder import RowEncoder
from graftune.settings.sections import DataConfig
from tests.data import training_marks as judge
from tests.data.template_judge import Trained, encode, opened, reference

CONTROL = (
    *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>", '<|"|>'),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
)
OURS = """
{{- bos_token -}}
{%- set opening = messages[0].content if messages[0].role == "system" else "" -%}
{%- if opening or tools or enable_thinking -%}
    {{- "<|turn>system\\n" + ("<|think|>\\n" if enable_thinking else "") + opening -}}
    {%- for tool in tools or [] -%}<|tool>declaration:{{ tool.function.name }}<tool|>{%- endfor -%}
    {{- "<turn|>\\n" -}}
{%- endif -%}
{%- set seen = namespace(user=-1, last="") -%}
{%- for m in messages if m.role == "user" -%}{%- set seen.user = seen.user + 1 -%}{%- endfor -%}
{%- set count = namespace(user=-1) -%}
{%- for m in messages if m.role != "system" -%}
    {%- if m.role == "tool" -%}
        {{- "response:" + (m.name or "tool") + '{value:<|"|>' + m.content + '<|"|>}<tool_response|>' -}}
    {%- elif m.role == "user" -%}
        {%- set count.user = count.user + 1 -%}
        {{- "<|turn>user\\n" + m.content + "<turn|>\\n" -}}
    {%- else -%}
        {{- "<|turn>model\\n" if seen.last != "tool" -}}
        {%- if m.reasoning_content and m.tool_calls and count.user == seen.user -%}
            {{- "<|channel>thought\\n" + m.reasoning_content + "\\n<channel|>" -}}
        {%- endif -%}
        {%- for call in m.tool_calls or [] -%}
            {{- "<|tool_call>call:" + call.function.name + "{" -}}
            {%- for key, value in call.function.arguments | dictsort -%}
                {{- ("" if loop.first else ",") + key + ':<|"|>' + value | string + '<|"|>' -}}
            {%- endfor -%}
            {{- "}<tool_call|>" -}}
        {%- endfor -%}
        {{- m.content + ("<|tool_response>" if m.tool_calls else "<turn|>\\n") -}}
    {%- endif -%}
    {%- set seen.last = m.role -%}
{%- endfor -%}
{%- if add_generation_prompt and seen.last != "tool" -%}
    {{- "<|turn>model\\n" + ("" if enable_thinking else "<|channel>thought\\n<channel|>") -}}
{%- endif -%}
"""
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": {}}}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "And in Oslo?"},
    {"role": "assistant", "content": "Cold.", "reasoning_content": "Winter."},
    {"role": "user", "content": "And Rome?"},
    {"role": "assistant", "content": "Mild."},
]
ASKED = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLING = [
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": "", "reasoning_content": "Ask.", "tool_calls": [ASKED]},
    {"role": "tool", "name": "weather", "tool_call_id": "1", "content": "cold"},
    {"role": "assistant", "content": "Cold."},
]
CALL = '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>'


def sources() -> dict[str, str]:
    folder = judge.folder()
    theirs = sorted(folder.glob("gemma4*.jinja")) if folder else []
    return {"ours": OURS} | {file.stem: file.read_text() for file in theirs}


SOURCES = sources()


def runs(source: str, messages: list[dict[str, Any]], tools: Any, thinking: bool) -> tuple[list[Trained], list[str]]:
    """What is trained, and the prompts of inference as transformers renders them."""
    variables = {"enable_thinking": thinking}
    config = DataConfig(max_seq_len=4096, template_vars=variables)
    found = encode(RowEncoder(opened(source, CONTROL), config, "data"), messages, tools)
    assert not found.refusal, found.refusal
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return found.runs, [reference(source, messages[:i], tools, True, **variables) or "" for i in places]


def thought(reasoning: str, prompt: str, rendered: str) -> str:
    """The channel of reasoning that is trained: none where the prompt has closed it, or where the template leaves it
    out of what it renders."""
    written = f"<|channel>thought\n{reasoning}\n<channel|>"
    return written if written in rendered and not prompt.endswith("<channel|>") else ""


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", SOURCES)
def test_answers(name: str, thinking: bool) -> None:
    """Only the answers are trained, each with the mark that ends it, behind the prompt that inference has."""
    source = SOURCES[name]
    found, prompts = runs(source, TALK, None, thinking)
    assert [run.before for run in found] == prompts and len(found) == 2
    assert all(("<|think|>" in prompt) == thinking for prompt in prompts)
    first = reference(source, TALK[:3], None, False, enable_thinking=thinking) or ""
    assert found[0].text == thought("Winter.", prompts[0], first) + "Cold.<turn|>"
    assert found[1].text == "Mild.<turn|>"


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", SOURCES)
def test_calls(name: str, thinking: bool) -> None:
    """A call is trained up to the mark of the reply, with its reasoning unless the prompt has closed it; the reply is
    not trained."""
    source = SOURCES[name]
    (call, answer), prompts = runs(source, CALLING, TOOLS, thinking)
    rendered = reference(source, CALLING, TOOLS, False, enable_thinking=thinking) or ""
    replied = "<|tool_response>" in rendered  # one revision has a turn of its own for it
    end = "<|tool_response>" if replied else "<turn|>"
    assert [call.before, answer.before] == prompts and "weather" in call.before
    assert call.text == thought("Ask.", prompts[0], rendered) + CALL + end
    # A prompt that opens a block is answered by its end.
    opened_block = prompts[1].endswith("<|channel>thought\n")
    assert answer.text == ("\n<channel|>" if opened_block else "") + "Cold.<turn|>"
    assert CALL + end in answer.before and "cold" in answer.before.partition(CALL)[2]
