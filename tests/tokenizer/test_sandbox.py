"""A template may take only so much time and memory, and everything that real ones do comes out as in plain Jinja."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2.ext
import jinja2.sandbox
import pytest

from graftune.data.template import chat_format
from graftune.errors import GraftuneError
from graftune.settings.config import DataConfig
from graftune.tokenizer import ChatTemplate, sandbox
from graftune.tokenizer.template import Unbounded
from tests.support import tiny
from tests.support.counting import Calls

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHIPPED = sorted((Path(__file__).parents[1] / "fixtures" / "chat_templates").glob("*.jinja"))
LOOP = "{% for a in range(99999) %}"
SLOW = {
    "nested loops": LOOP * 2 + "{% endfor %}{% endfor %}",
    "loops with output": LOOP * 2 + "x{% endfor %}{% endfor %}",
    "loops with a condition": "{% for a in range(99999) if a is odd %}{% for b in range(99999) if b == a %}{% endfor %}"
    "{% endfor %}",
    "loops that ask for their length": LOOP * 2 + "{% if loop.length == loop.revindex %}{% endif %}"
    "{% endfor %}{% endfor %}",
    "a loop in a macro": "{% macro f() %}" + LOOP * 2 + "{% endfor %}{% endfor %}{% endmacro %}{{ f() }}",
    "a macro that calls itself": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a loop that calls itself": "{% for x in [3] recursive %}{{ loop([3, 3]) if loop.depth < 60 }}{% endfor %}",
    "loops in a set block": "{% set x %}" + LOOP * 2 + "{% endfor %}{% endfor %}{% endset %}",
    "tests by a filter": "{{ range(99999) | reject('in', range(-998, 1) | list) | list | length }}",
    "tests that choose": "{{ range(99999) | select('in', range(-998, 1) | list) | list | length }}",
    "filters in a loop": LOOP + "{{ range(1000) | map('string') | sort | first }}{% endfor %}",
    "loops in a generation tag": "{% generation %}" + LOOP * 2 + "{% endfor %}{% endfor %}{% endgeneration %}",
}
DOUBLING = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = NEXT %}{% endfor %}{{ ns.x }}"


def doubling(start: str, then: str) -> str:
    return DOUBLING.replace("START", start).replace("NEXT", then)


LARGE = {
    "joined": doubling("'ab'", "ns.x ~ ns.x"),
    "kept in a block": "{% set x %}" + LOOP + "{{ 'a' * (16000000 + a % 7) }}{% endfor %}{% endset %}",
    "kept in a macro": "{% macro f() %}" + LOOP + "{{ 'a' * (16000000 + a % 7) }}{% endfor %}{% endmacro %}{{ f() }}",
    "kept in a list": "{{ range(99999) | map('string') | map('center', 16000000) | list | length }}",
    "kept to be sorted": "{{ range(99999) | map('string') | map('center', 16000000) | sort | length }}",
    "added": doubling("'ab'", "ns.x + ns.x"),
    "many terms": "{% set x = 'a' * 15000000 %}{{ X }}".replace("X", " + ".join("x" * 100)),
    "many pieces": "{% set x = 'a' * 15000000 %}{{ X }}".replace("X", " ~ ".join("x" * 100)),
    "multiplied": "{{ 'ab' * 10**9 }}",
    "multiplied from the left": "{{ 1000000000 * [1] }}",
    "lists": doubling("[1]", "ns.x + ns.x"),
    "lists of lists": doubling("[1]", "[ns.x, ns.x]"),
    "tuples of tuples": doubling("(1,)", "(ns.x, ns.x)"),
    "tables of tables": doubling("'a'", "{'a': ns.x, 'b': ns.x}"),
    "tables by call": doubling("'a'", "dict(a=ns.x, b=ns.x)"),
    "powers": "{{ 10**(10**10) }}",
    "powers of powers": doubling("7", "ns.x ** 60"),
    "squares": doubling("7", "ns.x * ns.x"),
    "padded": "{{ 'a' | center(10000000000) }}",
    "padded by a method": "{{ 'a'.ljust(10000000000) }}",
    "zeros": "{{ 'a'.zfill(10000000000) }}",
    "batches": "{{ [1] | batch(1000000000, 'x') | list }}",
    "slices": "{{ [1] | slice(1000000000) | list }}",
    "indented": "{{ 'a\\nb' | indent(1000000000) }}",
    "indented json": "{{ [[1]] | tojson(indent=1000000000) }}",
    "tabs": "{{ 'a\\tb'.expandtabs(1000000000) }}",
    "a format": "{{ '%1000000000d' % 1 }}",
    "a format with a width": "{{ '%*d' % (1000000000, 1) }}",
    "a format filter": "{{ '%1000000000d' | format(1) }}",
    "a format method": "{{ '{:1000000000}'.format(1) }}",
    "a format in a format": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "joins": doubling("'ab'", "ns.x | join(ns.x)"),
    "joins by a method": doubling("'ab'", "ns.x.join(ns.x)"),
    "replaced": doubling("'ab'", "ns.x.replace('', ns.x)"),
    "replaced by a filter": doubling("'ab'", "ns.x | replace('a', ns.x)"),
    "many widths": "{{ ('{:16000000}' * 200).format(*range(200)) }}",
    "many widths of numbers": "{{ ('%16000000d' * 200) % ((1,) * 200) }}",
    "a precision": "{{ '%.1000000000f' % 1.5 }}",
    "a precision among values": "{{ '%.*f' % (1000000000, 1.5) }}",
    "a width that is a text": "{{ '{:{w}}'.format(1, w='>1000000000') }}",
    "a width from a list": "{{ '{:{w[0]}}'.format(1, w=[1000000000]) }}",
    "a width behind a key": "{{ '%(((a)))1000000000d' % {'((a))': 1} }}",
    "a value in many fields": "{{ ('{0}' * 5000).format('a' * 60000) }}",
    "a value in many fields by its name": "{{ ('%(a)s' * 3000) % {'a': 'a' * 60000} }}",
    "a list that becomes a text": "{{ ([1] * 900) | replace('', 'a' * 60000) }}",
    "replaced by names": "{{ ('a' * 60000) | replace(new='b' * 60000, old='a') }}",
    "parted json": "{{ ([1] * 900) | tojson(separators=('a' * 60000, ':')) }}",
    "nested and indented json": doubling("1", "[ns.x]").replace("{{ ns.x }}", "{{ ns.x | tojson(indent=16000) }}"),
    "numbers out of texts": "{{ ('f' * 9000) | int(0, 16) % 7 }}",
    "paths of attributes": "{{ ('a' * 9999) | map(attribute='0' ~ '.0' * 9999) | list | length }}",
    "searched backwards": "{{ ('a' * 60000).rfind('ab' ~ 'a' * 30000) }}",
    "stripped": "{{ ('a' * 60000).strip('b' * 30000 ~ 'a') }}",
    "dates": "{{ strftime_now('%c' * 9999) }}",
    "digits": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "lorem ipsum": "{{ lipsum(n=1000000000) }}",
    "output": "{% set x = 'a' * 15000000 %}{{ x }}{{ x }}",
    "a macro's output": "{% macro f() %}{% set x = 'a' * 15000000 %}{{ x }}{{ x }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("kind", SLOW)
def test_a_template_without_an_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a millisecond whenever it is read: it is looked at, and often."""
    readings = itertools.count()
    monkeypatch.setattr(sandbox, "time", SimpleNamespace(thread_time=lambda: 1e-3 * next(readings)))
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    template = ChatTemplate(SLOW[kind], name="my.jinja")
    looks_often, message = Calls(most=500_000), r"my\.jinja: the template takes longer than 0\.2 seconds"
    with looks_often, pytest.raises(Unbounded, match=message) as error:
        template.render(TALK)
    assert "\n" not in str(error.value)


def test_time_that_the_process_did_not_have_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped, or the laptop asleep."""
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)

    class Asleep(dict[str, str]):
        def __getitem__(self, name: str) -> str:
            time.sleep(0.3)
            return super().__getitem__(name)

    template = ChatTemplate("{% for m in messages %}{{ m['content'] }}{% endfor %}", name="my.jinja")
    assert template.render([Asleep(turn) for turn in TALK]) == "HiHello"


@pytest.mark.parametrize("kind", LARGE)
def test_a_template_without_bounds(kind: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(GraftuneError, match=r"my\.jinja: ") as error:
            ChatTemplate(LARGE[kind], name="my.jinja").render(TALK)
        assert "\n" not in str(error.value) and len(str(error.value)) < 300
        assert isinstance(error.value, Unbounded) or kind == "lorem ipsum"
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


KEPT = {
    "by macros": "{% macro f(n) %}{% set x = 'a' * (60000 + n) %}{{ f(n + 1) }}{{ x[0] }}{% endmacro %}{{ f(0) }}",
    "by names": "".join(f"{{% set x{i} = 'a' * {60000 + i} %}}" for i in range(60)),
    "as slices": "{% set x = 'a' * 60000 %}" + "".join(f"{{% set x{i} = x[{i + 1}:] %}}" for i in range(60)),
    "as pieces": "".join(f"{{% set x{i} = ('a' * 60000 ~ '|' ~ {i}).split('|')[0] %}}" for i in range(60)),
    "as wide letters": "".join(f"{{% set x{i} = '\U0001f600' * {15000 + i} %}}" for i in range(60)),
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_kept_counts_together(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "KEPT", 0)
    with pytest.raises(Unbounded, match="keeps texts and lists of more than"):
        ChatTemplate(KEPT[kind]).render(TALK)


def test_the_clock_is_a_renderings_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts anew each time, in every thread, and none runs between two renderings."""
    monkeypatch.setattr(sandbox, "SECONDS", 0.3)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    slow = ChatTemplate(SLOW["nested loops"])
    found: list[str] = []

    def others() -> None:
        for _ in range(5):
            found.append(template.render(TALK))
            time.sleep(0.1)

    thread = threading.Thread(target=others)
    thread.start()
    with pytest.raises(Unbounded):
        slow.render(TALK)
    thread.join()
    assert found == ["HiHello"] * 5


def test_the_first_rendering_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not row after row: the sentence is the template's, from probing it or from a row that sets it off."""
    monkeypatch.setattr(sandbox, "SECONDS", 0.1)
    tokenizer = tiny.make_tokenizer()
    source = tiny.TEMPLATE + "{% if messages[0].content == 'go' %}" + SLOW["nested loops"] + "{% endif %}"
    template = ChatTemplate(source, eos_token=tiny.SPECIAL[2])
    form = chat_format(dataclasses.replace(tokenizer, template=template), DataConfig())
    assert form is not None and "Hello" in form.render(TALK, None)
    with pytest.raises(Unbounded):
        form.render([{"role": "user", "content": "go"}, TALK[1]], None)
    template, clocks = ChatTemplate(tiny.TEMPLATE + SLOW["nested loops"]), []
    rendered = sandbox.Sandbox.rendered
    monkeypatch.setattr(sandbox.Sandbox, "rendered", lambda self, *a: (clocks.append(self), rendered(self, *a))[1])
    with pytest.raises(Unbounded):
        chat_format(dataclasses.replace(tokenizer, template=template), DataConfig())
    assert len(clocks) == 1, "once, not once a probe"


def test_the_output_is_bounded_by_source_and_conversation() -> None:
    """What is rendered is encoded next, which takes hundreds of bytes a character."""
    template = ChatTemplate("{{ messages[0].content * 5 }}{{ 'a' * 60000 if messages | length > 2 }}")
    assert len(template.render([{"role": "user", "content": "a" * 100_000}])) == 500_000
    assert len(template.render([*TALK, *TALK])) > 60_000
    with pytest.raises(Unbounded, match="more than"):
        ChatTemplate("{{ ('a' * 16777000) * 1 }}").render(TALK)
    with pytest.raises(Unbounded, match="more than"):
        ChatTemplate("{% for i in range(9999) %}{{ 'a' * 100 }}{% endfor %}").render(TALK)


def test_the_clock_runs_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few long steps are no shorter than many quick ones."""
    readings = itertools.count(step=0.3)
    monkeypatch.setattr(sandbox, "time", SimpleNamespace(thread_time=lambda: next(readings)))
    with pytest.raises(Unbounded, match=r"longer than 0\.75 seconds"):
        ChatTemplate("{% set x = 'a' * 60000 %}" + "{{ (x | upper)[0] }}" * 9).render(TALK)
    assert ChatTemplate("{{ messages[0].content | upper }}").render(TALK) == "HI"


def test_a_long_conversation_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.count(step=1.5)
    monkeypatch.setattr(sandbox, "time", SimpleNamespace(thread_time=lambda: next(readings)))
    template = ChatTemplate("{{ messages[0].content | upper }}")
    assert len(template.render([{"role": "user", "content": "a" * 100_000}])) == 100_000


def test_a_source_that_is_no_template() -> None:
    with pytest.raises(GraftuneError, match="more than any template has"):
        ChatTemplate("x" * (sandbox.LONGEST_SOURCE + 1))


EQUAL = {
    "loops": "{% for x in [3, 1, 2] %}{{ loop.index }}/{{ loop.length }}/{{ loop.revindex }}/{{ loop.last }}"
    "/{{ loop.previtem }}/{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{% else %}none{% endfor %}",
    "loops over what has no length": "{% for x in [3, 1, 2] | map('string') %}{{ loop.index }}/{{ loop.length }}{{ x }}"
    "{% endfor %}",
    "loops over nothing": "{% for x in nowhere %}{{ x }}{% else %}none{% endfor %}{% for x in [] %}{% else %}b"
    "{% endfor %}",
    "loops with a condition": "{% for k, v in {'a': 1, 'b': 2}.items() if v > 1 %}{{ k }}{{ loop.length }}{% endfor %}",
    "loops over a text": "{% for c in 'abc' %}{{ c }}{{ loop.changed(c) }}{% endfor %}",
    "loops that call themselves": "{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }}"
    "{{ loop.depth }}{% endfor %}",
    "texts that are made and forgotten": "{% for i in range(3000) %}{% set x = 'a' * (60000 + i) %}{% endfor %}a",
    "many comparisons": "{{ 1 < 2 < 3 }}{{ 'a' in 'abc' }}{{ messages == messages[:] }}{{ 'a' not in messages[0] }}",
    "formats": "{{ '{0[role]}-{1:>5}-{x!r:.3}'.format(messages[0], 'a', x='abc') }}{{ '{a}'.format_map({'a': 1}) }}"
    "{{ ('<{}>' | safe).format('<') }}{{ '%(a)s %(b)5.1f%%' % {'a': 'x', 'b': 1.25} }}{{ '%*d' % (5, 3) }}",
    "json": "{{ 'a b c'.split() }}{{ 'a,b'.rsplit(',', 1) }}{{ 'a\nb'.splitlines() }}{{ 'ab'.translate({97: 'x'}) }}",
    "texts": "{{ 'a' ~ 1 ~ none ~ [1, 'b'] }}|{{ 'x' * 3 }}|{{ 2 ** 10 }}|{{ '%s-%05d' % ('a', 3) }}|{{ '%d' | "
    "format(7) }}|{{ '{:>5}'.format('a') }}|{{ 'a,b'.replace(',', ';') }}|{{ ', '.join(['a', 'b']) }}|{{ ['a', 1] | "
    "join('-') }}|{{ 'ab' | join('.') }}|{{ messages | map(attribute='role') | join(', ') }}|"
    "{{ messages | join('+', 'role') }}",
    "filters": "{{ 'a\nb' | indent(2) }}|{{ 'a' | center(5) }}|{{ [1, 2, 3] | batch(2, 'x') | list }}|"
    "{{ [1, 2, 3] | slice(2) | list }}|{{ 1.256 | round(1) }}|{{ 'a b c' | wordwrap(2) }}|{{ 'abcdef' | truncate(4) }}|"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}|{{ 'a' | replace('a', 'bb') }}",
    "sums": "{{ " + " + ".join(f"'{i}'" for i in range(50)) + " ~ 'a' + ('b' + 'c') }}{{ 1 + 2 * 3 + 4 }}",
    "pieces": "{{ " + " ~ ".join(str(i) for i in range(700)) + " }}",
    "lists": "{{ [1] + [2] }}{{ (1, 2) + (3,) }}{{ {'a': [1, (2,)]} }}{{ [1, 2][::-1] }}{% set a, b = 1, 2 %}{{ a }}"
    "{{ b }}",
    "numbers behind a colon": "{{ '12:00:1700000000 ~ ' ~ 'a:99999999999'.replace('a', 'b') }}"
    "{{ '{}'.format(1700000000) }}",
    "macros": "{% macro f(x, y=2) %}<{{ x }}{{ y }}{{ caller() if caller }}>{% endmacro %}{{ f(1) }}"
    "{% call f(3, y=4) %}in{% endcall %}",
    "blocks": "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{{ x }}{% endfilter %}{% with y = 3 %}{{ y }}"
    "{% endwith %}",
}


@pytest.mark.parametrize("kind", EQUAL)
def test_equal_to_plain_jinja(kind: str) -> None:
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    want = plain.from_string(EQUAL[kind]).render(messages=TALK)
    assert ChatTemplate(EQUAL[kind]).render(TALK) == want and want


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_it_costs_little(path: Path) -> None:
    """A conversation of 200 turns takes less than three times the calls of plain Jinja (at most 1.7 measured)."""
    talk: list[Any] = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i} " * 20} for i in range(200)]
    text = path.read_text(encoding="utf-8")
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    plain.globals["raise_exception"] = plain.globals["strftime_now"] = str
    theirs, ours = plain.from_string(text), ChatTemplate(text)
    with Calls() as plainly:
        theirs.render(messages=talk, bos_token="", eos_token="")
    with Calls(most=3 * plainly.count):
        ours.render(talk)


def test_what_is_safe_for_one_type_is_not_for_another() -> None:
    """Answers are remembered by type and name: a namespace may have any name, and a list is not to be changed."""
    talk = list(TALK)
    template = ChatTemplate("{% set n = namespace(append=1) %}{{ n.append }}{{ messages.append(1) }}", name="my.jinja")
    with pytest.raises(GraftuneError, match=r"my\.jinja: "):
        template.render(talk)
    assert talk == TALK
