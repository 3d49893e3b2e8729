"""Chat templates: rendered as transformers renders them, sandboxed, and with one sentence for every fault."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from graftune.errors import GraftuneError
from graftune.tokenizer import ChatTemplate

TALK = [
    {"role": "user", "content": "Hi <b> é"},
    {"role": "assistant", "content": "Hello & 'bye'"},
    {"role": "user", "content": "more"},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "<d> é", "parameters": {"type": "object"}}}
SOURCES = {
    "blocks": "{% for m in messages %}\n  {% if loop.first %}\n{{ bos_token }}\n  {% endif %}\n"
    "{{ m['role'] }}: {{ m.content | trim }}{{ eos_token }}\n{% endfor %}\n{% if add_generation_prompt %}A:{% endif %}",
    "json": "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ messages | tojson(ensure_ascii=True) }}",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, seen='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.seen = ns.seen ~ m.role[0] %}{% endfor %}{{ ns.n }}{{ ns.seen }}",
    "undefined": "{{ nowhere }}{{ messages[0].nothing }}{% if documents %}x{% endif %}{% if not tools is none %}t"
    "{% endif %}{{ flag | default('off') }}",
    "slices": "{{ messages[::-1][0].content }}{{ messages[1:] | length }}{{ dict(a=1) }}{{ 'a\\nb'.split('\\n')[-1] }}",
}
FIXTURES = Path(__file__).parents[1] / "fixtures" / "chat_templates"
ALL = SOURCES | {path.stem: path.read_text(encoding="utf-8") for path in sorted(FIXTURES.glob("*.jinja"))}


def _theirs(source: str, **given: Any) -> str:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = given.pop("messages")
    rendered, _ = utils.render_jinja_template(
        [messages], chat_template=source, bos_token="<s>", eos_token="</s>", **given
    )
    return rendered[0]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_equal_to_transformers(name: str, tools: list[Any] | None) -> None:
    ours = ChatTemplate(ALL[name], bos_token="<s>", eos_token="</s>")
    for prompt in (True, False):
        want = _theirs(ALL[name], messages=TALK, tools=tools, add_generation_prompt=prompt, flag="on")
        assert ours.render(TALK, tools=tools, add_generation_prompt=prompt, flag="on") == want


def test_the_date_is_fixed() -> None:
    source = "{{ strftime_now('%d %b %Y %H:%M') }}"
    first = ChatTemplate(source)
    assert first.render([]) == ChatTemplate(source).render([]) == datetime.date.today().strftime("%d %b %Y 00:00")
    past = datetime.datetime(2024, 7, 26)
    assert first.dated(past).render([]) == ChatTemplate(source, now=past).render([]) == "26 Jul 2024 00:00"


@pytest.mark.parametrize(
    "source",
    [
        *("{% for %}", "{{ a", "{% if x %}", "{% generation %}a", "{{ x | nosuch }}", "{% include 3 %", 5),
        "{{ raise_exception('roles must\nalternate') }}",
        "{{ messages[9].content.strip() }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].__class__.__mro__[1].__subclasses__() }}",
        "{{ 'a' + 1 }}",
        "{{ messages | tojson(indent='x', separators=3) }}",
        "{{ range(10000000) | list }}",
        "{% include 'other' %}",
    ],
)
def test_broken_sources_and_failing_renders(source: Any) -> None:
    with pytest.raises(GraftuneError) as error:
        ChatTemplate(source, name="my.jinja").render(TALK)
    assert str(error.value).startswith(("my.jinja: ", "my.jinja, line 1: ")) and "\n" not in str(error.value)


def test_a_refusal_is_told_in_the_templates_words() -> None:
    with pytest.raises(GraftuneError, match="refuses this conversation: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate!'[:-1] ~ '.') }}").render(TALK)


def test_messages_are_left_alone() -> None:
    talk = [dict(message) for message in TALK]
    ChatTemplate("{% for m in messages %}{% set m = dict(m, content='x') %}{{ m.content }}{% endfor %}").render(talk)
    assert talk == TALK


@pytest.mark.parametrize(
    "addition",
    [
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ ''.__class__ }}",
        "{% if messages | length > 7 %}{{ ''.__class__.__mro__ }}{% endif %}",
        "{{ messages['__class__'] }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages | attr('__class__') }}",
        "{% if not add_generation_prompt %}{{ messages.append(1) }}{% endif %}",
        "{{ raise_exception('no') if messages[0].role == 'system' else messages.clear() }}",
    ],
)
def test_a_template_that_is_not_carried_on(addition: str) -> None:
    template = ChatTemplate(SOURCES["blocks"] + addition, name="my.jinja")
    with pytest.raises(GraftuneError, match=r"my\.jinja: the template reaches") as error:
        template.checked_source()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "addition",
    [
        "{{ raise_exception('no system turn') if messages[0].role == 'system' }}",
        "{{ raise_exception('tools, please') if not tools }}",
        "{{ messages[9].content + 'x' }}",
        "{{ message._private }}__init__ in the text{{ '<__image__>' }}",
    ],
)
def test_a_template_that_only_refuses_is_carried_on(addition: str) -> None:
    source = SOURCES["blocks"] + addition
    assert ChatTemplate(source).checked_source() == source
