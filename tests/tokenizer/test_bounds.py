"""Every filter, test, method and global that a template may use, with the largest values that it may have: each takes
less than a CPU second and 64 MiB. What is refused at once may have less: then that is tried."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from graftune.tokenizer import ChatTemplate, bounds, sandbox
from tests.fuzz.judge import forget_peak, peak, resident
from tests.support.thorough import THOROUGH

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
# By the longest source: what a hostile template may make of a conversation that is not hostile.
MOST = bounds.most_made(sandbox.LONGEST_SOURCE, bounds.weight({"messages": TALK}, bounds.LARGEST))
TEXTS = ("a", "a ", "<", "<!--", "(", "http://a.b/(", "\n", "\u20ac\U0001f600", "&#1;")
# What else they are given; the others are given nothing.
MORE: dict[str, tuple[str, ...]] = {
    "attr": ("x",), "batch": ("99, text", "MANY, 1"), "center": ("LONG",), "default": ("text",), "d": ("text",),
    "filter": ("'x'",), "float": ("text",), "format": ("text", "*([text] * 9)"), "format_map": ("{}",),
    "groupby": ("0", "'0.0.0.0.0'"), "int": ("0, 16", "0, 36"), "join": ("'ab'", "text"), "ljust": ("LONG",),
    "map": ("'title'", "attribute='0.0.0.0.0'"), "max": ("attribute='0.0.0.0.0'",), "min": ("true",),
    "reject": ("'in', text",), "rejectattr": ("'0.0.0.0.0'", "0, 'in', text"), "replace": ("'a', 'bb'", "'', '-'"),
    "rjust": ("LONG",), "round": ("999, 'ceil'", "-999, 'floor'"), "select": ("'in', text",),
    "selectattr": ("'0.0.0.0.0'", "0, 'in', text"), "slice": ("99, text", "MANY, 1"),
    "sort": ("attribute='0.0.0.0.0'",),
    "sum": ("start=[]", "start=''", "start=0"), "truncate": ("9, true, text", "LONG, false"), "trim": ("text", "'ab'"),
    "unique": ("attribute='0.0.0.0.0'", "true"), "wordwrap": ("1", "1, true, '-'", "LONG"),
    "indent": ("9", "text, true"),
    "zfill": ("LONG",), "expandtabs": ("9",), "translate": ("{97: 'bb'}",), "strip": ("text", "'ab'"),
    "tojson": ("true, 1", "true, none, ('aaaa', 'bbbb')", "true, none, none, true"), "split": ("' '", "'aa'", "''"),
    "urlize": ("1", "none, true, text"), "xmlattr": ("true",), "dictsort": ("true, 'value'",), "get": ("text",),
    "fromkeys": ("range(99999)", "text"), "copy": (), "index": ("text", "none", "HALF"),
    "rsplit": ("' '", "'aa'", "HALF"),
} | dict.fromkeys(
    ("find", "rfind", "rindex", "count", "startswith", "endswith", "partition", "rpartition", "removeprefix",
     "removesuffix", "lstrip", "rstrip"), ("text", "'ab'", "HALF"),
)  # fmt: skip
OTHERS = (
    "cycler(*values).next()", "joiner(text)()", "namespace(x=text)", "dict(x=text)", "range(99999) | list",
    "strftime_now('%c' * 500)", "strftime_now('%999999999Y')", "strftime_now(text)", "raise_exception(text)",
    "text ~ text", "text + text", "text[1:] == text[:-1]", "HALF in text", "text % values", "text.format(*values)",
    "('{:9999}' * 200).format(*range(200))", "('{:16000000}' * 200).format(*range(200))", "'{:{w}}'.format(1, w=LONG)",
    "'{:{w}}'.format(1, w='>99999999')", "('%9999d' * 200) % tuple(values)", "('%(a)s' * 200) % {'a': text}",
    "('{0}' * 9999).format(text)", "'%.*f' | format(LONG, 1.5)", "'%(((a)))99999999d' % {'((a))': 1}",
    "'{:.99999999f}'.format(1.5)", "text * 2", "values * 2", "2 ** 16000", "(2 ** 8000) // (2 ** 4000 + 1)",
    "(2 ** 8000 - 1) * (2 ** 8000 + 1) % (2 ** 7999 + 1)", "text | safe | string | escape", "(text | safe).unescape()",
    "(text | safe).striptags()", "(text | safe).format(1)", "(text | safe) % 1", "values | map('center', LONG) | list",
    "(1).from_bytes(values | map('length') | list)", "(1).to_bytes(99999999, 'big')", "text.encode('punycode')",
    "[[[[[[values]]]]]] | tojson(indent=999)", "values | map('list') | map('join') | unique | list",
    "values | map('string') | groupby('0.0.0.0.0.0')", "values.index(none)", "values.count(text)",
    "values | map('wordwrap') | list", "values | map('float') | list",
    "{'a': text} | xmlattr", "{'a': text, 'b': values} | urlencode", "dict(a=values).values() | list",
)  # fmt: skip


def sources() -> Iterator[str]:
    environment = ChatTemplate("")._sandbox
    filters = [name for name in environment.filters if not name.startswith("graftune.")]
    for name in filters:
        for more in ("", *MORE.get(name, ())):
            called = f"text | {name}({more})"
            # What comes one by one is gone through.
            yield (
                f"{called} | list | length" if name in sandbox._LAZY | {"unique", "batch", "slice", "items"} else called
            )
            if more and name in bounds.FREE:
                continue
            yield called.replace("text", "values", 1) + (" | list" if name in sandbox._LAZY | {"unique"} else "")
        yield f"table | {name}"
        if name not in bounds._FAST:
            yield f"range(99999) | {name}"
    for name in environment.tests:
        if name.isalpha():
            yield f"text is {name}"
            yield f"text is {name}(text)"
            yield f"values | select('{name}', values) | list"
    for kind, value in (("text", ""), ("values", []), ("table", {}), ("table.keys()", {}.keys()), ("16", 16)):
        for name in dir(value):
            if environment.is_safe_attribute(value, name, getattr(value, name)):
                for more in ("", *MORE.get(name, ())):
                    yield f"({kind}).{name}({more})"
    yield from OTHERS


def variables(text: str, long: int) -> dict[str, Any]:
    """`values` are few long texts or many short ones."""
    whole = (text * (long // len(text) + 1))[: long - 1]
    values = [text] * (MOST // (len(text) + bounds.EACH) - 1) if len(text) < 4 else [whole[:4000]] * (MOST // 4100)
    found = {"text": whole, "values": values, "LONG": MOST - 1, "MANY": MOST // bounds.EACH - 1}
    table = {f"{i}{value}": value for i, value in enumerate(values[: MOST // (4 * bounds.EACH + len(text))])}
    return found | {"HALF": whole[: len(whole) // 2] + "b", "table": table}


def test_nothing_takes_long_or_much_memory() -> None:
    """With one of the texts each (with every one where support/thorough.py says so). All of them together stay below
    the memory that each may take."""
    cases = sorted(set(sources()))
    given = {(text, long): variables(text, long) for text in TEXTS for long in (MOST, bounds.SMALL - bounds.EACH)}
    times: list[tuple[float, str, str]] = []
    environment = ChatTemplate("")._sandbox
    watched, before = forget_peak(), resident()
    for number, source in enumerate(cases):
        template = environment.compiled("{{ " + source + " }}")
        environment._source = sandbox.LONGEST_SOURCE
        for text in TEXTS if THOROUGH else (TEXTS[number % len(TEXTS)],):
            for long in (MOST, bounds.SMALL - bounds.EACH):
                # As the template's own: what it is given would raise the limits.
                template.globals.update(given[text, long])
                began, refusal = time.thread_time(), ""
                try:
                    environment.rendered(template, {"messages": TALK})
                except Exception as error:  # as in ChatTemplate.render: it may be anything
                    refusal = str(error)
                times.append((time.thread_time() - began, source, text))
                if f"more than {bounds.SMALL} " not in refusal:
                    break
    grown = peak() - before if watched else 0
    times.sort(reverse=True)
    print(f"{len(times)} renderings, {grown >> 20} MiB; the slowest: {times[:3]}")
    assert times[0][0] < 1, times[0]
    assert grown < 64 << 20
