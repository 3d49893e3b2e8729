"""Texts of small languages, damaged by their words: settings in YAML, chat templates, tables in CSV."""

# ruff: noqa: E501 (words of languages, many to a line)
from __future__ import annotations

import bz2
import gzip
import lzma
from random import Random

from tests.fuzz.mutate import NUMBERS, TEXTS, some_bytes, some_text

YAML_WORDS = (
    "&a ", "*a", "*b", "!!python/object/apply:os.system [x]", "!!python/name:os.system ", "!!binary aGk=", "!!set {a, b}",
    "!!omap [a: 1]", "!!timestamp 2026-01-01", "!!int ", "!!float ", "!tag ", "<<: *a", "<<: {rank: 3}", "? ", "- ", ": ", "# ",
    "| \n", "> \n", "|2-\n", "---\n", "...\n", "%YAML 1.1\n", "%TAG ! x:\n", "{", "}", "[", "]", ",", "'", '"', "\t", "\n", "  ",
    "{a: {b: {c: ", "[" * 40, "[" * 3000, "{a: " * 500, "- " * 200, "0x" + "f" * 50, "0b1", "0o7", "1:30:00", "9" * 5000, ".inf",
    ".NaN", "~", "yes", "No", "2026-13-45", "2026-01-01T25:99:99", "1_0", "rank: 4\n", "\nlora:\n  rank: ", "data: {a: 1}\n",
    "data: [{path: x, weight: -1}, 3]\n", "template_vars: {a: {b: [1, 2]}}\n", "map: {1: 2}\n", "targets: [1]\n", "\x85", "\ufeff",
)  # fmt: skip
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)
)
YAML = (
    "base: some/model\ndata: data.jsonl\nrank: 16\nalpha: 32\nlr: 2e-4\nepochs: 1.5\ntargets: [q_proj, v_proj]\n",
    "lora:\n  rank: 8\n  targets: all\n  new_tokens: ['<a>', '<b>']\ndata:\n  data:\n    - {path: a.jsonl, weight: 2}\n"
    "    - path: b.csv\n      map: {prompt: q, response: a}\n  max_seq_len: 512\n  template_vars: {thinking: true}\n"
    "  date: 2026-01-01\ntrain:\n  seed: 3\noptim:\n  lr: 0.0002\n  schedule: cosine\n",
    "# a comment\nbase: &b x\ntemplate: *b\ndropout: 0\nval_split: 0.1\ntrain_norms: yes\nmap:\n  prompt: question\n",
    BOMB,
)


def some_yaml(draw: Random) -> bytes:
    text = some_text(draw, draw.choice(YAML), YAML_WORDS)
    if draw.random() < 0.3:
        text = text.replace("16", str(draw.choice(NUMBERS[:25])))
    made = text.encode("utf-8", "surrogatepass")
    return some_bytes(draw, made, 1) if draw.random() < 0.1 else made


# Chat templates.

TEMPLATES = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{{ bos_token }}{%- set ns = namespace(found=false, last=messages|length - 1) -%}{%- for m in messages[::-1] -%}"
    "{%- if m.role == 'user' and not ns.found -%}{%- set ns.found = true -%}{%- set ns.last = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}{%- for m in messages -%}{%- if m.role not in ['user', 'assistant', 'system', 'tool'] -%}"
    "{{ raise_exception('unknown role ' ~ m.role) }}{%- endif -%}{{ '<|' ~ m.role ~ '|>' }}{{ m.content | trim }}"
    "{%- if m.tool_calls is defined -%}{%- for c in m.tool_calls -%}{{ c.function.arguments | tojson(indent=2) }}"
    "{%- endfor -%}{%- endif -%}{{ eos_token }}{%- endfor -%}",
    "{% macro show(m, depth=0) %}[{{ m.role }}] {{ m.content.split('</think>')[-1].lstrip('\n') }}{% endmacro %}"
    "{% if tools %}{{ tools | map(attribute='function') | list | tojson }}{% endif %}"
    "{% for m in messages %}{{ show(m) }}{% generation %}{{ m.content[:3] }}{% endgeneration %}{% endfor %}"
    "{{ strftime_now('%d %b %Y') }}",
    "{% for m in messages %}{{ m.content.replace('a', 'b') ~ ('-' * 3) }}{{ '%s|%5d' % (m.role, loop.index) }}"
    "{{ [1, 2, 3] | join(',') }}{{ 'x'.join(['a', 'b']) }}{{ '{:>4}'.format(loop.index) }}{% endfor %}",
)
TEMPLATE_WORDS = (
    "{% for i in range(99999) %}", "{% for i in range(99999) %}{% for j in range(99999) %}", "{% endfor %}", "{% endif %}",
    "{% set x = 'a' * 99999999 %}", "{% set x = x + x %}", "{% set ns.x = ns.x ~ ns.x %}", "{{ 9 ** 9 ** 9 }}", "{{ 10 ** 5000 }}",
    "{{ 'a' | center(999999999) }}", "{{ 'a'.ljust(999999999) }}", "{{ '%999999999d' % 1 }}", "{{ '{:999999999}'.format(1) }}",
    "{{ (1, 2) * 99999999 }}", "{{ ''.__class__.__mro__ }}", "{{ messages.__class__ }}", "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__ }}", "{{ namespace(**{'__class__': 1}) }}", "{% include '/etc/passwd' %}", "{% import 'x' as y %}",
    "{% extends 'x' %}", "{% block a %}{{ self.a() }}{% endblock %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro g(n) %}{{ g(n) ~ g(n) }}{% endmacro %}{{ g(1) }}", "{% break %}", "{% continue %}", "{% raw %}", "{% endraw %}",
    "{{ range(1000000) | list }}", "{{ messages | tojson(indent=99999) }}", "{{ messages | pprint }}", "{{ 'a,' * 9999 | urlize }}",
    "{{ x.y.z }}", "{{ messages[99] }}", "{{ 1 / 0 }}", "{{ none + 'a' }}", "{{ dict(a=1) | items | list }}", "{{ 'a' is foo }}",
    "{{ [[]] * 9999 | tojson }}", "{% set l = [] %}{% set _ = l.append(l) %}{{ l }}", "{{ messages | sort(attribute='x') }}",
    "{{ '\x1b[2J' }}", "{{ raise_exception('\x1b]0;x\x07\n' * 500) }}", "{{ strftime_now('%' * 9999) }}", "{{ strftime_now(1) }}",
    "{{ strftime_now('%999999999Y') }}", "{{ '(' * 300 }}", "{{" + "(" * 200 + "1" + ")" * 200 + "}}", "{{ " + "-" * 300 + "1 }}",
    "{{ 1" + " + 1" * 2000 + " }}", "{% if a %}" * 60, "{{ messages | map('upper') | join }}", "{{ ('a' * 9999) | wordwrap(1) }}",
    "{{ ('ab' * 9999) | replace('a', 'b' * 9999) }}", "{{ 'a'.encode() }}", "{{ '%c' % 1114112 }}", "{{ 1 | round(99999999) }}",
    "{{ '9' * 5000 | int }}", "{{ '\ud800' }}", "{{ messages | batch(0) | list }}", "{{ messages | slice(0) | list }}",
    "{{ joiner }}", "{{ lipsum(99) }}", "{% call f() %}x{% endcall %}", "{% filter upper %}x{% endfilter %}", "{% autoescape true %}",
    "{% trans %}", "{% do x %}", "{{ 'a' | xmlattr }}", "{{ {'a': 1} | xmlattr }}", "{{ 'a' | attr('__class__') }}", "{{ 0x }}",
)  # fmt: skip


def some_template(draw: Random) -> str:
    text = draw.choice(TEMPLATES)
    for _ in range(draw.choice((1, 1, 2, 3))):
        kind, at = draw.randrange(4), draw.randrange(len(text) + 1)
        if kind == 0:
            text = text[:at] + draw.choice(TEMPLATE_WORDS) + text[at:]
        elif kind == 1:  # between two tags
            at = text.find("%}", at) + 2
            text = text[:at] + draw.choice(TEMPLATE_WORDS) + text[at:]
        elif kind == 2:
            text = draw.choice(TEMPLATE_WORDS) + draw.choice(TEMPLATE_WORDS) + text
        else:
            text = some_text(draw, text, TEMPLATE_WORDS)
    return text


# Tables.

CSV = (
    'prompt,response\nhello,world\n"a, b","c ""d"""\n',
    "instruction;input;output\nx;y;z\n1;2;3\n",
    'messages\tweight\n"[{""role"": ""user"", ""content"": ""a""}, {""role"": ""assistant"", ""content"": ""b""}]"\t1\n',
    'text\nfirst line\n"second\nline"\n',
)
CSV_WORDS = (
    '"',
    '""',
    ",",
    ";",
    "\t",
    "|",
    "\n",
    "\r",
    "\r\n",
    "\0",
    "\x1a",
    "x" * 200_000,
    '"' * 99,
    ",,,,",
    "\ufeff",
    "é",
    "=cmd()",
)


def some_csv(draw: Random) -> bytes:
    made = some_text(draw, draw.choice(CSV), CSV_WORDS).encode("utf-8", "surrogatepass")
    return encoded(draw, made)


def encoded(draw: Random, made: bytes) -> bytes:
    """Now and then compressed, in another encoding, or damaged as bytes."""
    kind = draw.randrange(14)
    if kind == 0:
        made = draw.choice((gzip.compress, bz2.compress, lzma.compress))(made)
        return some_bytes(draw, made, 1) if draw.random() < 0.5 else made
    if kind == 1:
        return made.decode("utf-8", "ignore").encode(draw.choice(("utf-16", "utf-16-be", "utf-32", "cp1252")), "ignore")
    if kind == 2:
        return some_bytes(draw, made, 2)
    if kind == 3:
        return (
            draw.choice(
                (b"\xef\xbb\xbf", b"\xff\xfe", b"PAR1", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"<html", b"ARROW1")
            )
            + made
        )
    if kind == 4 and draw.random() < 0.02:
        return gzip.compress(draw.choice((b"[", b'{"a":', b" ", b'"', b"[],")) * draw.choice((100_000, 3_000_000)))
    return made


__all__ = ["CSV", "TEMPLATES", "TEXTS", "YAML", "encoded", "some_csv", "some_template", "some_yaml"]
