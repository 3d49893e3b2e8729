"""Templates that open reasoning, need tools, hold system prompts back or close calls otherwise: a test per finding."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import tokenizers

from graftune.data.chat import CLOSED_AT_ONCE, NOT_RENDERED, OTHER_PROMPT
from graftune.data.dataset import prepare
from graftune.data.format import EMPTY_NOT_TRAINED, EVERYTHING_TRAINED
from graftune.data.mask import ACROSS
from graftune.errors import GraftuneError
from graftune.settings.sections import DataConfig
from tests.data.helpers import CHATML, prepared, tokenizer, turns, with_template
from tests.data.test_masks import REASONING, all_runs


def test_the_start_of_an_answer_is_never_inside_a_tag(tmp_path: Path) -> None:
    """D1: the prompt opens <|im_start|> where the answered conversation goes on with <|im_end|>, of which both have
    the first five letters; cut there, neither would be a control token."""
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if not loop.last or m.role != 'user' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    data = prepared(tmp_path, {"messages": turns("a", "b")}, with_template(source))
    assert data.prompts == ["<|im_start|>user\na<|im_start|>assistant\n"] and all_runs(data) == ["b<|im_end|>"]
    ids = data.examples[0].tokens
    assert list(ids).count(tokenizer().encode("<|im_start|>")[0]) == 2


def test_null_content_stays_null(tmp_path: Path) -> None:
    """D2: the template tells a call by `content is none`; with "" it would print an empty answer and its end first."""
    source = (
        "{% for m in messages %}{% if m.tool_calls and m.content is none %}"
        "{% set call = m.tool_calls[0].function %}"
        "{{ '<|im_start|>assistant\ncall ' + call.name + call.arguments + '<|im_end|>\n' }}"
        "{% elif m.role == 'tool' %}{{ '<|im_start|>tool\n' + m.content + '<|im_end|>\n' }}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    for content in (None, ""):  # arguments are wanted as text here (D8), and an empty content as null
        record = {"messages": [*turns("a"), {"role": "assistant", "content": content, "tool_calls": [call]}]}
        data = prepared(tmp_path, record, with_template(source))
        assert all_runs(data) == ['call weather{"city": "Oslo"}<|im_end|>'] and not data.summary.notes


def test_two_answers_in_a_row(tmp_path: Path) -> None:
    """D3: the second one's opening, which the model has to write, is trained."""
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}{% else %}"
        "{{ ('<|assistant|>' if messages[loop.index0 - 1].role == 'user' else '[more] ') + m.content + '<|end|>' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role == 'user' %}{{ '<|assistant|>' }}{% endif %}"
    )
    data = prepared(tmp_path, {"messages": [*turns("a", "b"), {"role": "assistant", "content": "c"}]},
                    with_template(source))  # fmt: skip
    assert all_runs(data) == ["b<|end|>[more] c<|end|>"]


def test_a_system_prompt_in_the_last_turn_only(tmp_path: Path) -> None:
    """D4: the prompt that inference gives has it, and so has every example."""
    source = (
        "{% for m in messages %}{% if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    # As the last turn the assistant's would get it too: only the inference prompt is right.
    data = prepared(tmp_path, {"messages": turns("a", "b", "c", "d", system="Be brief.")}, with_template(source))
    assert len(data.examples) == 2 and all("Be brief.\n" in prompt for prompt in data.prompts)


def test_what_is_not_rendered_is_counted(tmp_path: Path) -> None:
    """D5, and D6: an empty system turn is no missing one."""
    messages = turns("One?", "<think>\nhm\n</think>\n\nBlue", "Two?", "Red")
    messages[3]["reasoning_content"] = "because"
    data = prepared(tmp_path, {"messages": messages}, with_template(REASONING))
    assert data.summary.notes[NOT_RENDERED["reasoning"]] == 1
    system = CHATML.replace("{% for", "{% if messages[0].role != 'system' %}{{ 'DEFAULT' }}{% endif %}{% for")
    empty = [{"role": "system", "content": ""}, *turns("a", "b")]
    assert "DEFAULT" not in prepared(tmp_path, {"messages": empty}, with_template(system)).prompts[0]
    assert "DEFAULT" in prepared(tmp_path, {"messages": turns("a", "b")}, with_template(system)).prompts[0]


def test_template_vars_and_reasoning(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if thinking is defined and not thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
    )
    chat, messages = with_template(source), turns("a", "b", "c", "d")
    messages[3]["thinking"] = "why"  # another spelling of the field that the template reads
    empty, full = "<think>\n\n</think>\n\n", "<think>\nwhy\n</think>\n\n"
    for choice, runs in {
        "all": [f"{empty}b<|im_end|>", f"{full}d<|im_end|>"],
        "not_empty": ["b<|im_end|>", f"{full}d<|im_end|>"],
        "none": ["b<|im_end|>", "d<|im_end|>"],
    }.items():
        data = prepared(tmp_path, {"messages": messages}, chat, train_reasoning=choice)
        assert all_runs(data) == runs and not any("auto" in note for note in data.summary.notes)
        if choice == "not_empty":  # what auto means for a template that writes empty blocks
            chosen = prepared(tmp_path, {"messages": messages}, chat)
            assert all_runs(chosen) == runs and chosen.summary.notes == {EMPTY_NOT_TRAINED: 0} | data.summary.notes
    field = source.replace("'<think>\n' + (m.reasoning_content or '')", "'<think>\n' + m.reasoning_content").replace(
        "{% if m.role == 'assistant' %}", "{% if m.reasoning_content %}"
    )
    data = prepared(tmp_path, {"messages": messages}, with_template(field))  # the block only where there is reasoning
    assert all_runs(data) == ["b<|im_end|>", f"{full}d<|im_end|>"] and EVERYTHING_TRAINED in data.summary.notes
    data = prepared(tmp_path, {"messages": turns("a", "b")}, chat, template_vars={"thinking": False})
    assert data.prompts[0].endswith(empty) and all_runs(data) == ["b<|im_end|>"]
    for variables, why in (
        ({"messages": "x"}, "messages is set by graftune"),
        ({"thinkng": 1}, "reads no variable 'thinkng'"),
    ):
        with pytest.raises(GraftuneError, match=why):
            prepared(tmp_path, {"messages": messages}, chat, template_vars=variables)


def test_reasoning_as_a_part_of_the_content(tmp_path: Path) -> None:
    """Ministral 3's template reads it from the list of parts; a template that prints a list as JSON does not."""
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% else %}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ '[THINK]' + p.thinking + '[/THINK]' if p.type == 'thinking' else p.text }}{% endfor %}{% endif %}"
        "{{ '</s>' }}{% endif %}{% endfor %}"
    )
    chat, messages = with_template(source), turns("a", "b", "c", "[THINK]so[/THINK]d", "e", "f")
    messages[1]["reasoning_content"] = "why"
    for choice, runs in {
        "auto": ["[THINK]why[/THINK]b</s>", "[THINK]so[/THINK]d</s>", "f</s>"],
        "none": ["b</s>", "d</s>", "f</s>"],
    }.items():
        data = prepared(tmp_path, {"messages": messages}, chat, train_reasoning=choice)
        assert all_runs(data) == runs and not data.summary.notes
    printed = CHATML.replace("m.content", "(m.content if m.content is string else m.content | tojson)")
    data = prepared(tmp_path, {"messages": messages[:2]}, with_template(printed))
    assert all_runs(data) == ["b<|im_end|>"] and NOT_RENDERED["reasoning"] in data.summary.notes


def test_reasoning_behind_a_token_across_the_border(tmp_path: Path) -> None:
    """Vocabularies of today take two line breaks as one token: "<think>\\n" and "\\n</think>" share one."""
    backend = tokenizers.Tokenizer.from_str(tokenizer().backend.to_str())
    backend.add_tokens([tokenizers.AddedToken("\n\n", normalized=False)])
    source = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
    chat = dataclasses.replace(with_template(source), backend=backend)
    for choice, trained in (
        ("all", "\n</think>\n\nb<|im_end|>"),
        ("not_empty", "b<|im_end|>"),
        ("none", "b<|im_end|>"),
    ):
        data = prepared(tmp_path, {"messages": turns("a", "b")}, chat, train_reasoning=choice)
        example, inference = data.examples[0], chat.encode(data.prompts[0])
        assert list(example.tokens[: len(inference)]) == inference
        assert chat.decode([t for t, on in zip(example.tokens, example.supervised, strict=True) if on]) == trained
        assert data.summary.notes.keys() == {OTHER_PROMPT["inference"], CLOSED_AT_ONCE, ACROSS}
    data = prepared(tmp_path, {"messages": turns("a", "<think>\nwhy\n</think>\n\nb")}, chat)
    assert not any("reasoning" in note for note in data.summary.notes), "it is rendered, behind the prompt's own tag"


def test_templates_that_need_tools_are_probed_with_them(tmp_path: Path) -> None:
    """D8: the template reads its tools whatever the conversation, and closes calls with a token of its own."""
    source = (
        "{% for t in tools %}{{ t.function.name + '\n' }}{% endfor %}{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\n' }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}"
        "{{ '<|end_of_turn|>' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    data = prepared(tmp_path, {"messages": [*turns("a"), answer], "tools": tools}, with_template(source))
    assert all_runs(data) == ['{"city": "Oslo"}<|end_of_turn|>'] and data.prompts[0].startswith("weather\n")


def test_append_eos_comes_once(tmp_path: Path) -> None:
    """D9: a tool call that ends with EOS already gets no second one."""
    source = (
        "{% for m in messages %}{{ m.role + ': ' }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name + '</s>' }}"
        "{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    source = source.replace("function.name", "function.name + (m.tool_calls[0].function.arguments | tojson)")
    record = {"messages": [*turns("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]}
    assert all_runs(prepared(tmp_path, record, with_template(source), append_eos=True)) == ["weather{}</s>"]
    data = prepared(tmp_path, {"messages": turns("a", "b")}, with_template(source), append_eos=True)
    assert all_runs(data) == ["b</s>"]


def test_a_token_across_prompt_and_answer(tmp_path: Path) -> None:
    """The prompt keeps the tokens that it has at inference, the answer begins after them, and the row is counted."""
    chat = with_template(CHATML)
    for answer in ("\n\nTwo lines down", "  spaces"):
        record = {"messages": turns("a", answer)}
        data = prepared(tmp_path, record, chat)
        inference = tokenizer().encode(data.prompts[0])
        example = data.examples[0]
        assert list(example.tokens[: len(inference)]) == inference and not any(example.supervised[: len(inference)])
        assert all(example.supervised[len(inference) :]) and all_runs(data) == [answer + "<|im_end|>"]


def test_one_huge_row_is_refused_by_itself(tmp_path: Path) -> None:
    """D13: not the file, and not in the template's name."""
    path = tmp_path / "data.jsonl"
    rows = [{"messages": turns("x" * 5_000_000, "b")}, {"messages": turns("a", "b")}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows.append(
        {"messages": [*turns("a"), {"role": "assistant", "content": "b", "reasoning_content": "x" * 5_000_000}]}
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = prepare(str(path), with_template(CHATML), DataConfig())
    assert len(data) == 1 and data.summary.refused == {"too long to render": 2}
