"""Which tokens are trained: over 18 real chat templates and some made to be difficult."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graftune.data import mask
from graftune.data.row import Refusal
from graftune.errors import GraftuneError
from graftune.tokenizer import Tokenizer
from tests.data.helpers import (
    CHATML,
    NO_END,
    TEMPLATES,
    all_runs,
    prepared,
    shipped,
    tokenizer,
    turns,
    with_template,
)

# What stands before and after an answer's own text in the trained span. A space before it is the model's to write
# wherever the generation prompt stops short of it.
AROUND = {
    "alpaca": ("", "</s>"),
    "chatml": ("", "<|im_end|>"),
    "gemma-it": ("", "<end_of_turn>"),
    "granite-3.0-instruct": ("", "<|end_of_text|>"),
    "llama-2-chat": (" ", " </s>"),
    "llama-3-instruct": ("", "<|eot_id|>"),
    "mistral-instruct": (" ", "</s>"),
    "openchat-3.5": (" ", "<|end_of_turn|>"),
    "phi-3": ("", "<|end|>"),
    "phi-3-small": ("", "<|end|>"),
    "qwen2.5-instruct": ("", "<|im_end|>"),
    "saiga": ("", "</s>"),
    "vicuna": (" ", "</s>"),
    "zephyr": ("", "</s>"),
    "amberchat": (" ", "</s>"),
    "chatqa": (" ", "</s>"),
    "falcon-instruct": (" ", "</s>"),
    "solar-instruct": ("", "</s>"),
}
ANSWERS = ("It is sunny, about 20°C.", "One two three", "Yes! 🎉")
THREE_TURNS = ("What is it?", ANSWERS[0], "And when?", ANSWERS[1], "Really?", ANSWERS[2])


def test_every_shipped_template_is_listed() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(AROUND)


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("count", [1, 3])
def test_real_templates(name: str, system: str, count: int, tmp_path: Path) -> None:
    record = {"messages": turns(*THREE_TURNS[: 2 * count], system=system)}
    data = prepared(tmp_path, record, shipped(name), append_eos=name in NO_END)
    before, after = AROUND[name]
    assert all_runs(data) == [before + answer + after for answer in ANSWERS[:count]]
    # This tokenizer divides two line breaks by what follows them, so a prompt that ends with them has other tokens in
    # the middle of a conversation than at its end: there each turn is an example of its own.
    apart = name in NO_END or name == "llama-3-instruct"
    assert len(data.examples) == (count if apart else 1)
    for example in data.examples:
        assert example.supervised[-1], "an example ends with its last trained token"
    last = data.examples[-1]
    untrained = tokenizer().decode([t for t, on in zip(last.tokens, last.supervised, strict=True) if not on])
    assert THREE_TURNS[2 * count - 2] in untrained and (not system or system in untrained)
    assert data.prompts[-1] + before + ANSWERS[count - 1] + after == tokenizer().decode(last.tokens)
    assert data.references[-1] == ANSWERS[count - 1]


@pytest.mark.parametrize("name", [name for name in AROUND if name not in NO_END])
def test_append_eos_leaves_templates_with_an_end_alone(name: str, tmp_path: Path) -> None:
    record = {"messages": turns(*THREE_TURNS)}
    plain = prepared(tmp_path, record, shipped(name))
    assert prepared(tmp_path, record, shipped(name), append_eos=True).examples == plain.examples


@pytest.mark.parametrize("name", AROUND)
def test_what_the_prompt_says_does_not_move_the_mask(name: str, tmp_path: Path) -> None:
    """Markers in user text, an answer that repeats the question, an answer found in the system text."""
    marker = AROUND[name][1].strip()
    asked = f"Say {ANSWERS[0]} {marker}\n<|im_start|>assistant\n### Response:\nASSISTANT: [/INST] {ANSWERS[0]}{marker}"
    record = {"messages": turns(asked, ANSWERS[0], ANSWERS[0], ANSWERS[0], system=ANSWERS[0])}
    data = prepared(tmp_path, record, shipped(name), append_eos=name in NO_END)
    before, after = AROUND[name]
    assert all_runs(data) == [before + ANSWERS[0] + after] * 2
    assert data.summary.notes["rows whose text spells a control token of the model"] == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(
        st.text(
            st.one_of(st.sampled_from(" \n<|>am_ed"), st.characters(exclude_categories=["Cs"])), min_size=1, max_size=24
        ).filter(lambda text: text.strip()),
        min_size=2,
        max_size=6,
    ).filter(lambda texts: len(texts) % 2 == 0)
)
def test_any_text_masks_right(texts: list[str], tmp_path: Path) -> None:
    data = prepared(tmp_path, {"messages": turns(*texts)}, with_template(CHATML), max_seq_len=4096)
    assert all_runs(data) == [answer + "<|im_end|>" for answer in texts[1::2]]


def test_a_control_token_that_swallows_the_blank_behind_it(tmp_path: Path) -> None:
    """Phi-3's do: <|assistant|> then covers the answer's first space, and still is not trained."""
    backend = tokenizers.Tokenizer.from_str(tokenizer().backend.to_str())
    backend.add_special_tokens([tokenizers.AddedToken("<|bot|>", special=True, rstrip=True)])
    source = CHATML.replace("<|im_start|>assistant\n", "<|bot|>\n").replace(
        "'<|im_start|>' + m.role + '\n'", "('<|bot|>' if m.role == 'assistant' else '<|user|>') + '\n'"
    )
    chat = dataclasses.replace(with_template(source), backend=backend)
    data = prepared(tmp_path, {"messages": turns("a", " b", "c", "d")}, chat)
    bot = backend.token_to_id("<|bot|>")
    for example in data.examples:
        assert bot in example.tokens
        assert not any(on for token, on in zip(example.tokens, example.supervised, strict=True) if token == bot)
    assert [run.strip() for run in all_runs(data)] == ["b<|im_end|>", "d<|im_end|>"]


ENDS = [answer + "<|im_end|>" for answer in ANSWERS]
FLAGGED = {1: {"train": True}, 3: {"weight": 0}, 5: {"weight": 1}}
EARLY = FLAGGED | {5: {"weight": 0}}


def flagged(flags: dict[int, dict[str, Any]]) -> dict[str, Any]:
    return {"messages": [turn | flags.get(i, {}) for i, turn in enumerate(turns(*THREE_TURNS))]}


@pytest.mark.parametrize(
    ("record", "train_on", "runs"),
    [
        # OpenAI's meaning (D11): a turn of weight 0 is context, one without a weight is trained.
        (flagged(FLAGGED), "all", [ENDS[0], ENDS[2]]),
        (flagged(FLAGGED), "last", ENDS[2:]),
        (flagged(FLAGGED), "flagged", [ENDS[0], ENDS[2]]),
        (flagged(EARLY), "flagged", ENDS[:1]),
        ({"prompt": "a", "response": "b"}, "flagged", ["b<|im_end|>"]),
    ],
)
def test_train_on(record: dict[str, Any], train_on: str, runs: list[str], tmp_path: Path) -> None:
    data = prepared(tmp_path, record, with_template(CHATML), train_on=train_on)
    (example,) = data.examples
    assert all_runs(data) == runs and tokenizer().decode(example.tokens).endswith(runs[-1])


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (EARLY | {1: {"train": False}}, r"row 1.*nothing to train"),
        (EARLY | {0: {"train": True}}, r"not the assistant's: message 1"),
    ],
)
def test_flags_that_train_no_answer_are_refused(flags: dict[int, dict[str, Any]], why: str, tmp_path: Path) -> None:
    with pytest.raises(GraftuneError, match=why):
        prepared(tmp_path, flagged(flags), with_template(CHATML), train_on="flagged")


def test_bos_is_the_templates_business(tmp_path: Path) -> None:
    for name, expected in (("llama-3-instruct", 1), ("phi-3", 0)):
        chat = dataclasses.replace(shipped(name), add_bos=True)
        data = prepared(tmp_path, {"messages": turns("a", "b")}, chat)
        assert data.examples[0].tokens.count(tokenizer().bos_id) == expected  # type: ignore[arg-type]


def test_a_template_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(CHATML)
    data = prepared(tmp_path, {"messages": turns("a", "b")}, shipped("zephyr"), template=str(file))
    assert all_runs(data) == ["b<|im_end|>"]
    with pytest.raises(GraftuneError, match=r"gone\.jinja.*cannot be read"):
        prepared(tmp_path, {"messages": turns("a", "b")}, tokenizer(), template=str(tmp_path / "gone.jinja"))
    file.write_text("{% if %}")
    with pytest.raises(GraftuneError, match=r"own\.jinja"):
        prepared(tmp_path, {"messages": turns("a", "b")}, tokenizer(), template=str(file))


def test_tool_calls(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    record = {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "20"},
            {"role": "assistant", "content": "Warm."},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}],
    }
    data = prepared(tmp_path, record, shipped("qwen2.5-instruct"), max_seq_len=4096)
    assert all_runs(data) == [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
        "Warm.<|im_end|>",
    ]
    assert "<tool_response>\n20\n</tool_response>" in data.prompts[0] and '"parameters"' in data.prompts[0]
    with pytest.raises(GraftuneError, match="does not render tool calls"):
        prepared(tmp_path, record, with_template(CHATML))
    record["messages"][1] = {"role": "assistant", "content": "Let me see."}
    with pytest.raises(GraftuneError, match="does not render the role 'tool'"):
        prepared(tmp_path, record, shipped("granite-3.0-instruct"))


def test_degenerate_masks_are_refused() -> None:
    with pytest.raises(Refusal, match="everything is trained"):
        mask.check([7, 8, 9], [(0, 3)], frozenset({9}))
    with pytest.raises(Refusal, match="without its end token"):
        mask.check([7, 8, 9], [(1, 2)], frozenset({9}))
    with pytest.raises(Refusal, match="nothing to train"):
        mask.check([7, 8, 9], [(1, 1)], frozenset({9}))


WITH_BOS = dataclasses.replace(tokenizer(), add_bos=True)


@pytest.mark.parametrize(
    ("record", "chat", "template", "prompt", "whole", "trained"),
    [
        ("What is it? ", with_template(CHATML), "none", "What is it? ", "What is it? One two</s>", ["One two</s>"]),
        ("What is it? ", WITH_BOS, "auto", "<s>What is it? ", "<s>What is it? One two</s>", ["One two</s>"]),
        # U18: a base without a template parts prompt and response, and says so.
        ("What is it?", tokenizer(), "auto", "What is it?\n", "What is it?\nOne two</s>", ["One two</s>"]),
        (turns("a", "b", "c", "d", system="S"), WITH_BOS, "none", None, "<s>S\nab</s>cd</s>", ["b</s>", "d</s>"]),
        ({"text": "a"}, tokenizer(), "auto", None, "a</s>", ["a</s>"]),
        ({"text": "a"}, WITH_BOS, "auto", None, "<s>a</s>", ["<s>a</s>"]),
        ({"text": "a"}, shipped("chatqa"), "auto", None, "a</s>", ["a</s>"]),  # no template is looked at
    ],
)
def test_without_a_template(
    record: Any, chat: Tokenizer, template: str, prompt: str | None, whole: str, trained: list[str], tmp_path: Path
) -> None:
    if isinstance(record, str):
        record = {"prompt": record, "response": "One two"}
    data = prepared(tmp_path, {"messages": record} if isinstance(record, list) else record, chat, template=template)
    assert tokenizer().decode(data.examples[0].tokens) == whole and all_runs(data) == trained
    assert prompt is None or data.prompts == [prompt]
    parted = isinstance(record, dict) and "prompt" in record and template == "auto"
    assert ("no chat template: prompt, line break, response" in data.summary.template) == parted


@pytest.mark.parametrize(
    ("chat", "messages", "why"),
    [
        *((shipped(name), turns("a", "b"), f"{name}.*never learn to stop.*append_eos") for name in NO_END),
        (tokenizer(), turns("a", "b"), "no chat template.*template: none"),
        (shipped("llama-3-instruct"), [*turns("a"), *turns("b", "c")], "row 1.*must alternate"),
    ],
)
def test_refused_by_name(chat: Tokenizer, messages: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(GraftuneError, match=why):
        prepared(tmp_path, {"messages": messages}, chat)
