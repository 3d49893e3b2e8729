"""Masks over templates and conversations made up at random, against a renderer that shares no code with the package.

Checked of every case: the tokens before an answer are those of the prompt that inference gives, encoded by itself;
exactly the assistant's turns with their ends are trained; no control token is broken; and every word that was written
stands in an example or is accounted for in a note. `make test-templates` runs 10,000 cases.
"""

from __future__ import annotations

import os
import random
import re

import pytest

from graftune.data.chat import NO_REASONING, NOT_RENDERED
from graftune.data.fit import Built
from tests.data.generated import Spec, conversation
from tests.data.helpers import CONTROL, built, tokenizer, with_template

CASES = int(os.environ.get("GRAFTUNE_TEMPLATE_CASES", "180"))
WORD = re.compile(r"w\d+q\d+")
PARTS = 6  # so that workers share them


def check(seed: int) -> None:
    draw = random.Random(seed)
    spec = Spec.random(draw)
    messages, tools = conversation(draw, spec)
    chat = with_template(spec.source())
    assert chat.template is not None
    if not (spec.system == "refused" and messages[0]["role"] == "system") and spec.tools != "text":
        assert chat.template.render(messages, tools=tools) == spec.full(messages, tools), "the two renderers differ"
    row: dict[str, object] = {"messages": messages}
    made = built(row | ({"tools": tools} if tools else {}), chat, max_seq_len=8192)
    answered = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    found = [run for one in made for run in runs(one)]
    assert len(found) == len(answered), (len(found), len(answered))
    for (before, trained), i in zip(found, answered, strict=True):
        prompt = spec.prompt(messages[:i], tools)
        assert before == tokenizer().encode(prompt), (tokenizer().decode(before), prompt)
        assert tokenizer().decode(trained) == spec.answer(messages[: i + 1])
    everything = "".join(tokenizer().decode(list(one.example.tokens)) for one in made if one.example)
    notes = {note for one in made for note in one.notes}
    lost = set(WORD.findall(str(messages))) - set(WORD.findall(everything))
    assert not lost or notes & {NO_REASONING, *NOT_RENDERED.values()}, (lost, notes)
    for name in CONTROL:
        ids = [token for one in made if one.example for token in one.example.tokens]
        assert everything.count(name) == ids.count(tokenizer().backend.token_to_id(name)), f"{name} is broken"


def runs(one: Built) -> list[tuple[list[int], list[int]]]:
    """(the tokens before, the trained tokens) of each run of trained tokens."""
    assert one.example is not None
    tokens, flags = list(one.example.tokens), list(one.example.supervised)
    starts = [k for k in range(len(flags)) if flags[k] and (k == 0 or not flags[k - 1])]
    found = []
    for start in starts:
        end = next((k for k in range(start, len(flags)) if not flags[k]), len(flags))
        found.append((tokens[:start], tokens[start:end]))
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_generated_templates(part: int) -> None:
    for seed in range(part, CASES, PARTS):
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"case {seed}: {Spec.random(random.Random(seed))}") from error
