"""Reasoning in a channel of its own, as harmony writes it: every prompt ends with the text that closes such a message,
which must not be taken for a block that the prompt has closed."""

from __future__ import annotations

import pytest

from graftune.data.row_encoder import RowEncoder
from graftune.settings.sections import DataConfig
from tests.data.template_judge import encode, opened

CONTROL = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
TEMPLATE = """
{%- for m in messages -%}
    {%- if m.role == "assistant" -%}
        {%- if "thinking" in m and loop.last and not add_generation_prompt -%}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking + "<|end|>" -}}
        {%- endif -%}
        {{- "<|start|>assistant<|channel|>final<|message|>" + m.content -}}
        {{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" -}}
    {%- else -%}
        {{- "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
TALK = [
    {"role": "user", "content": "And in Oslo?"},
    {"role": "assistant", "content": "Cold.", "reasoning_content": "Winter."},
    {"role": "user", "content": "And Rome?"},
    {"role": "assistant", "content": "Mild."},
]
ANALYSIS = "<|channel|>analysis<|message|>Winter.<|end|><|start|>assistant"


@pytest.mark.parametrize(("trained", "analysis"), [("all", ANALYSIS), ("none", "")])
def test_channels(trained: str, analysis: str) -> None:
    config = DataConfig(max_seq_len=4096, train_reasoning=trained)  # type: ignore[arg-type]
    first, second = encode(RowEncoder(opened(TEMPLATE, CONTROL), config, "data"), TALK, None).runs
    assert first.text == analysis + "<|channel|>final<|message|>Cold.<|return|>"
    asked = "<|start|>user<|message|>And in Oslo?<|end|><|start|>assistant"
    assert first.before == asked + ("" if analysis else ANALYSIS)
    assert second.text == "<|channel|>final<|message|>Mild.<|return|>"
    cold = "<|channel|>final<|message|>Cold.<|end|><|start|>user<|message|>And Rome?<|end|><|start|>assistant"
    assert second.before == asked + cold
