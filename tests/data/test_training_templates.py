"""What we train of a model's own template is what TRL's training template marks, apart from documented policies.

The templates are others' and are not kept here: TRL has to be installed, or GRAFTUNE_TRAINING_TEMPLATES has to name the
folder trl/chat_templates of an unpacked wheel."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from graftune.data.row_encoder import RowEncoder
from graftune.settings.sections import DataConfig
from tests.data import training_marks as judge
from tests.data.template_judge import encode, opened
from tests.data.training_marks import (
    CLOSE,
    CLOSED,
    EMPTY,
    END,
    LAST,
    OPEN,
    POLICIES,
    PROMPT,
    compare,
    conversations,
    encoder_of,
)

DATE = {"current_date": "2026-11-18"}
THINKING = ({"enable_thinking": True}, {"enable_thinking": False})
# Twelve conversations with each of two settings of a template, and the policies that explain all differences.
TEMPLATES: dict[str, tuple[tuple[dict[str, Any], ...], set[str]]] = {
    "qwen3_5_think": (THINKING, {END, PROMPT, EMPTY, CLOSED}),
    "qwen3_5_nothink": (THINKING, {END, PROMPT, EMPTY, CLOSED}),
    "qwen3_6": (THINKING, {END, PROMPT, EMPTY, CLOSED}),
    "qwen3_8": (THINKING, {END, PROMPT, EMPTY, CLOSED}),
    "muse_glimmer": (({"reasoning_strength": "high"} | DATE, {"reasoning_strength": "low"} | DATE), {PROMPT}),
    "gptoss": (({"reasoning_effort": "high"}, {"reasoning_effort": "low"}), {PROMPT, LAST}),
    "glm4moe": (THINKING, {PROMPT, EMPTY, CLOSED, LAST}),
}
# Of templates that write reasoning otherwise than Qwen's: the tags. Of those that leave answers open, the end tokens.
TAGS = {"glm4moe": ("\n<think>", "</think>")}
STOPS = {"glm4moe": ("<|user|>", "<|observation|>")}


@pytest.mark.parametrize("name", TEMPLATES)
def test_trained_tokens_are_trls_marks(name: str) -> None:
    folder = judge.folder()
    if folder is None or not (folder / f"{name}.jinja").is_file():
        pytest.skip(f"install trl 1.16, or set {judge.FOLDER} to the folder trl/chat_templates, to run this")
    source, training = ((folder / f"{name}{kind}.jinja").read_text() for kind in ("", "_training"))
    settings, documented = TEMPLATES[name]
    count, turns, used = 0, 0, set[str]()
    for variables in settings:
        encoder = encoder_of(source, variables, STOPS.get(name, ()))
        for title, messages, tools in conversations():
            found = compare(encoder, training, messages, tools, variables, TAGS.get(name, (OPEN, CLOSE)))
            assert not found.fault, (name, title, variables, found.fault)
            count, turns, used = count + 1, turns + found.turns, used | found.policies
    assert count == 24 and turns == 46 and used == documented
    print(f"{name}: {turns} answers in {count} conversations; {', '.join(sorted(used))}")


def test_policies_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    assert all(f"| {policy} |" in text for policy in POLICIES)


@pytest.mark.parametrize(
    ("mark", "prompt", "block", "wanted", "used"),
    [
        ("b<e>\n", "a", "", "b<e>", {END}),
        (f"{OPEN}why{CLOSE}b<e>", f"a{OPEN}", "", f"why{CLOSE}b<e>", {PROMPT}),
        (f"{OPEN}{CLOSE}b<e>", f"a{OPEN}", CLOSE, "b<e>", {PROMPT, EMPTY}),
        (f"{OPEN}{CLOSE}b<e>", "a", OPEN + CLOSE, "b<e>", {EMPTY}),
        (f"{OPEN}why{CLOSE}b<e>", f"a{OPEN}{CLOSE}", "", "b<e>", {CLOSED}),
        (f"{OPEN}{CLOSE}b<e>", f"a{OPEN}{CLOSE}", "", "b<e>", {PROMPT}),
        ("b<e>", "a", "", "b<e>", set()),
    ],
)
def test_policies_change_marks_as_they_say(mark: str, prompt: str, block: str, wanted: str, used: set[str]) -> None:
    assert judge.explained(mark, prompt) == (block, wanted, used)


OPEN_ANSWERS = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|result|>{{ m.content }}{% else %}<|{{ m.role }}|>"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments.values() | join }}</call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_an_open_answer_is_closed_by_the_role_that_follows() -> None:
    """A text by the next question's token, a call by that of its result; both are end tokens of the model."""
    made = opened(OPEN_ANSWERS, ("<|user|>", "<|assistant|>", "<|result|>", "<|system|>"))
    made = dataclasses.replace(made, stop_ids=tuple(made.backend.token_to_id(n) for n in ("<|user|>", "<|result|>")))
    encoder = RowEncoder(made, DataConfig(), "data")
    for title, messages, tools in conversations():
        if "reasoning" in title:
            continue
        runs = encode(encoder, messages, tools).runs
        calls = [bool(m.get("tool_calls")) for m in messages if m["role"] == "assistant"]
        assert len(runs) == len(calls), title
        for run, is_call in zip(runs, calls, strict=True):
            assert run.text.endswith("</call><|result|>" if is_call else ".<|user|>"), (title, run)
            assert run.text.count("<|") == 1 and run.before.endswith("<|assistant|>")
