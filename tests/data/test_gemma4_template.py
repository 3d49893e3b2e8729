"""Gemma 4's way of writing a conversation: reasoning is a channel, which the prompt has closed already where thinking
is off; a call ends with the mark of the reply that it waits for, and the reply continues the same turn.

The template here has that form and is ours. GRAFTUNE_GEMMA4_TEMPLATE may name the file of the model's own: the same is
trained then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from graftune.data.row_encoder import RowEncoder
from graftune.settings.config import DataConfig
from tests.data.template_judge import encode, opened

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
REPLY = '<|tool_response>response:weather{value:<|"|>cold<|"|>}<tool_response|>'


def source() -> str:
    named = os.environ.get("GRAFTUNE_GEMMA4_TEMPLATE")
    return Path(named).read_text() if named else OURS


def runs(messages: list[dict[str, Any]], tools: Any, thinking: bool) -> tuple[list[Any], set[str]]:
    config = DataConfig(max_seq_len=4096, template_vars={"enable_thinking": thinking})
    found = encode(RowEncoder(opened(source(), CONTROL), config, "data"), messages, tools)
    assert not found.refusal, found.refusal
    return found.runs, found.notes


@pytest.mark.parametrize("thinking", [True, False])
def test_answers(thinking: bool) -> None:
    """Only the answers are trained, each with the mark that ends it, behind the prompt that inference has. Earlier
    reasoning is not rendered, which is noted."""
    (first, second), notes = runs(TALK, None, thinking)
    assert (first.text, second.text) == ("Cold.<turn|>", "Mild.<turn|>")
    closed = "" if thinking else "<|channel>thought\n<channel|>"
    assert first.before.endswith(f"And in Oslo?<turn|>\n<|turn>model\n{closed}")
    assert second.before.endswith(f"Cold.<turn|>\n<|turn>user\nAnd Rome?<turn|>\n<|turn>model\n{closed}")
    assert ("<|think|>" in first.before) == thinking and any("reasoning" in note for note in notes)


@pytest.mark.parametrize("thinking", [True, False])
def test_calls(thinking: bool) -> None:
    """A call is trained up to the mark of the reply, its reasoning where thinking is on; the reply is not trained."""
    (call, answer), _ = runs(CALLING, TOOLS, thinking)
    thought = "<|channel>thought\nAsk.\n<channel|>" if thinking else ""
    assert call.text == f"{thought}{CALL}<|tool_response>" and answer.text == "Cold.<turn|>"
    assert answer.before.endswith(CALL + REPLY) and "weather" in call.before
