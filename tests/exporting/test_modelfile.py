"""The Modelfile's template, run by a small reading of Go's template language, writes what our own template writes.

Only what modelfile.py emits is understood here: range over messages, if, else if, else, eq, ne, a variable, a literal.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from graftune.data.template import chat_format, usable_format
from graftune.errors import GraftuneError
from graftune.exporting.modelfile import modelfile, recognise
from graftune.settings.sections import DataConfig
from graftune.tokenizer import ChatTemplate
from tests.exporting import models

CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML + GENERATE
)
INSTRUCT = (  # no system turn, strict alternation, BOS printed
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% elif (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% elif m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %} {{ m['content'] }}<|im_end|>{% endif %}"
    "{% endfor %}"
)
BRACES = CHATML.replace("<|im_start|>", "{{ '{{' }}<|im_start|>") + GENERATE
LAST_ONLY = "{% set m = messages[-1] %}<|im_start|>{{ m['content'] }}<|im_end|>" + GENERATE
NUMBERED = "{% for m in messages %}{{ loop.index }}: {{ m['content'] }}<|im_end|>{% endfor %}"

TALKS = (
    ["user"],
    ["system", "user"],
    ["user", "assistant", "user"],
    ["system", "user", "assistant", "user", "assistant", "user"],
)


def with_template(source: str) -> Any:
    made = models.tokenizer()
    return dataclasses.replace(made, template=ChatTemplate(source, bos_token="", eos_token="<|im_end|>"))


def messages(roles: list[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": f"some {role} text, {place}"} for place, role in enumerate(roles)]


@pytest.mark.parametrize("source", [CHATML + GENERATE, DEFAULT_SYSTEM, INSTRUCT, BRACES])
def test_go_renders_what_jinja_renders(source: str) -> None:
    tokenizer = with_template(source)
    form = chat_format(tokenizer, DataConfig())
    assert form is not None
    text, notes = modelfile("./x.gguf", None, form, tokenizer)
    assert not notes
    template = text.split('TEMPLATE """')[1].split('"""')[0]
    for roles in TALKS:
        assert go(template, messages(roles)) == form.render(messages(roles), None, generate=True)


def test_a_last_turn_of_the_assistants_is_gone_on_with() -> None:
    tokenizer = with_template(CHATML + GENERATE)
    template = recognise(chat_format(tokenizer, DataConfig()), tokenizer).go()
    assert go(template, messages(["user", "assistant"])).endswith("<|im_start|>assistant\nsome assistant text, 1")


@pytest.mark.parametrize(("source", "why"), [(LAST_ONLY, "leaves out turns"), (NUMBERED, "by where they stand")])
def test_what_cannot_be_expressed_is_said(source: str, why: str) -> None:
    tokenizer = with_template(source)
    form = chat_format(tokenizer, DataConfig())
    with pytest.raises(GraftuneError, match=why):
        recognise(form, tokenizer)
    text, notes = modelfile("./x.gguf", None, form, tokenizer)
    assert why in notes[0] and why in text and 'TEMPLATE "' not in text and 'stop "<|im_end|>"' in text


def test_plain_prompts_append_eos_and_paths() -> None:
    tokenizer = models.tokenizer()
    form = chat_format(tokenizer, DataConfig(template="none"))
    text, _ = modelfile("/my models/base.gguf", "./lora.gguf", form, tokenizer)
    assert 'FROM "/my models/base.gguf"\nADAPTER ./lora.gguf\n' in text
    template = text.split('TEMPLATE """')[1].split('"""')[0]
    assert go(template, messages(["user"])) == "some user text, 0"
    unended = with_template("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    form = chat_format(unended, DataConfig(append_eos=True))
    shown = go(recognise(form, unended).go(), messages(["user", "assistant", "user"]))
    assert shown == "user: some user text, 0\nassistant: some assistant text, 1<|im_end|>\nuser: some user text, 2\n"


def test_a_base_without_a_template_gets_the_line_break_it_was_trained_with() -> None:
    tokenizer = dataclasses.replace(models.tokenizer(), template=None)
    form = usable_format(tokenizer, DataConfig())
    text, notes = modelfile("./x.gguf", None, form, tokenizer)
    template = text.split('TEMPLATE """')[1].split('"""')[0]
    assert not notes and go(template, messages(["user"])) == "some user text, 0\n"


def test_an_end_token_that_is_ordinary_text_stops_nothing() -> None:
    """Qwen's vocabulary has an ordinary "</s>", and Ollama would cut HTML there."""
    tokenizer = with_template(CHATML + GENERATE)
    ordinary = tokenizer.encode("a")[0]
    tokenizer = dataclasses.replace(tokenizer, stop_ids=(*tokenizer.stop_ids, ordinary))
    text, _ = modelfile("./x.gguf", None, chat_format(tokenizer, DataConfig()), tokenizer)
    assert re.findall('stop "(.*)"', text) == ["<|endoftext|>", "<|im_end|>"]


def test_a_template_with_a_date_is_said() -> None:
    tokenizer = with_template("{{ strftime_now('%Y') }}" + CHATML + GENERATE)
    text, notes = modelfile("./x.gguf", None, chat_format(tokenizer, DataConfig()), tokenizer)
    assert "prints the date" in notes[0] and "prints the date" in text


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "fixtures" / "chat_templates").glob("*.jinja")), ids=lambda p: p.stem
)
def test_templates_of_real_models(path: Path) -> None:
    """All of them can be expressed."""
    tokenizer = models.tokenizer()
    form = chat_format(tokenizer, DataConfig(template=str(path), append_eos=True))
    assert form is not None
    template = recognise(form, tokenizer).go()
    for roles in TALKS:
        talk = messages(roles)
        ended = [m | {"content": m["content"] + form.append} if m["role"] == "assistant" else m for m in talk]
        assert go(template, talk) == form.render(ended, None, generate=True)


def go(template: str, talk: list[dict[str, str]]) -> str:
    """Run a template as Go would."""
    pieces = [p for p in re.split(r"(\{\{.*?\}\})", template, flags=re.DOTALL) if p]
    variables = {"$before": ""}

    def holds(condition: str, message: dict[str, str]) -> bool:
        verb, name, value = condition.split(" ", 2)
        known = message["role"] if name == ".Role" else variables[name]
        return (known == value.strip('"')) == (verb == "eq")

    def block(at: int, message: dict[str, str], live: bool) -> tuple[str, int, str]:
        """Text up to the matching end or else, where that stands, and what it says."""
        out = ""
        while at < len(pieces):
            piece = pieces[at]
            word = piece[2:-2].strip() if piece.startswith("{{") else None
            if word is None:
                out += piece if live else ""
            elif word == "end" or word.startswith("else"):
                return out, at, word
            elif word.startswith("$before :="):
                variables["$before"] = word.split('"')[1]
            elif word == "$before = .Role":
                if live:
                    variables["$before"] = message["role"]
            elif word.startswith('"'):
                out += word.strip('"') if live else ""
            elif word == ".Content":
                out += message["content"] if live else ""
            elif word == "range .Messages":
                for each in talk:
                    text, end, _ = block(at + 1, each, live)
                    out += text
                at = end
            elif word.startswith("if "):
                taken, condition = False, word[3:]
                while True:
                    now = live and not taken and (condition == "" or holds(condition, message))
                    text, at, word = block(at + 1, message, now)
                    out, taken = out + text, taken or now
                    if word == "end":
                        break
                    condition = word.removeprefix("else").strip().removeprefix("if ").strip()
            else:
                raise AssertionError(f"what is {piece}?")
            at += 1
        return out, at, "end"

    return block(0, {"role": "", "content": ""}, True)[0]
