"""The Jinja environment of chat templates, set up as transformers documents it.

It is Jinja's own immutable sandbox with trimmed blocks, loop controls, a plain `tojson`, `raise_exception` and a
`{% generation %}` tag, so a template renders the same bytes here as there. The sandbox keeps a template away from
Python's objects; it does not limit time or memory. examine.py tries a new template under such limits first. Rejected:
limits inside the environment, which took more code than all the rest and slowed every rendering.

The examining process loads this file by its path (examine_process.py), so it imports nothing of graftune.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MOST_NAMES = 4096  # attributes that are remembered as safe or not


class TemplateRefusal(Exception):
    """A template called raise_exception; the text is its own reason for not accepting the conversation."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks assistant text for other trainers; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares the attribute this way

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, not the bare body: like the tag in transformers it opens a scope of its own.
        return jinja2.nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is. Jinja's own filter escapes HTML, and a prompt is not HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, which decides about each attribute once per type."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._safe: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's own answer follows from the object's type and the name alone, and takes most of an access's time."""
        key = type(obj), attr
        if (safe := self._safe.get(key)) is None:
            safe = super().is_safe_attribute(obj, attr, value)
            if len(self._safe) < MOST_NAMES:  # a template may compute names
                self._safe[key] = safe
        return safe


@functools.cache
def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    return made


@functools.lru_cache(maxsize=64)
def compiled(source: str) -> jinja2.Template:
    """Compile a template, or return it from the cache: a process opens the same tokenizer several times."""
    made = environment()
    # With a plain dict of globals: each rendering copies them, which takes several times longer from Jinja's chain.
    return made.template_class.from_code(made, made.compile(source), dict(made.globals))
