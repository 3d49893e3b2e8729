"""Chat templates: the model's own Jinja, rendered in a sandbox.

Purpose: turn messages into the text the model was trained on. Method: the environment that transformers documents
for chat templates (immutable sandbox, trimmed blocks, loop controls, plain `tojson`, `raise_exception`,
`strftime_now`, a tolerated `{% generation %}` tag), so that a template renders the same bytes here. The date is fixed
when the template is built: a template that prints today's date renders the same text all run long. Rejected: hand
written renderers per family, which drift from what the model saw.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from graftune.errors import GraftuneError
from graftune.private import find
from graftune.tokenizer.bounds import Endless
from graftune.tokenizer.sandbox import Sandbox

LONGEST_REASON = 10_000  # characters of an error's text that are looked at
LONGEST_DATE = 1000  # characters of a date's format, each of which may become 256
_JinjaNamespace: Any = find("jinja2.utils.Namespace")


_PRIVATE = re.compile(r"(?:^|[.\[])(__[a-z_]+__)(?:$|[].:!}[])")  # by itself, or in the fields of a format
_PROBE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
]


class Unbounded(GraftuneError):
    """A rendering that had no end: the template's fault, whatever the conversation."""


class _Refusal(Exception):
    """A template called raise_exception: its own words for what it does not accept."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks assistant text for other trainers; its body is kept as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares the attribute this way

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, not the bare body: like the tag in transformers it opens a scope of its own.
        return jinja2.nodes.CallBlock(self.call_method("_keep"), [], [], body).set_lineno(line)

    def _keep(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(_JinjaNamespace):
    """Jinja's namespace() without names that begin with an underscore: no way round the sandbox's own rule."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _refuse_private(name)
        _JinjaNamespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold the name {name}")


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _to_json(
    sandbox: Sandbox,
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; a prompt is not HTML."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # Indented, its length depends on how deep it is nested: then it is counted piece by piece.
    return encoder.encode(value) if indent is None else sandbox.joined(encoder.iterencode(value))


def _one_line(text: object) -> str:
    return " ".join(str(text)[:LONGEST_REASON].split()).rstrip(".") or "no reason given"


def today() -> datetime.date:
    return datetime.date.today()


class ChatTemplate:
    """One compiled template with the tokens it may print. `now` is what `strftime_now` shows."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        name: str = "chat template",
        now: datetime.datetime | None = None,
    ):
        if not isinstance(source, str):
            raise GraftuneError(f"the template is not text but {type(source).__name__}", where=name)
        self.source, self.bos_token, self.eos_token, self.name = source, bos_token, eos_token, name
        # Midnight: a date is what templates print, and two constructions on one day then agree to the byte.
        self.now = now or datetime.datetime.combine(today(), datetime.time())
        environment = Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.add_filter("tojson", functools.partial(_to_json, environment))
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._date
        environment.globals["namespace"] = _Namespace
        try:
            self._sandbox, self._compiled = environment, environment.compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise GraftuneError(
                f"the template does not parse: {_one_line(error.message)}",
                where=f"{name}, line {error.lineno}",
                fix="fix the Jinja source, or set template to another file",
            ) from error
        except (jinja2.TemplateError, RecursionError, ValueError, SyntaxError) as error:
            # The last three come from Python's own compiler, for sources nested too deep or with odd literals.
            raise GraftuneError(f"the template does not compile: {_one_line(error)}", where=name) from error

    def _date(self, form: str) -> str:
        if len(form) > LONGEST_DATE:
            raise Endless(f"writes a date by a format of more than {LONGEST_DATE} characters")
        return self.now.strftime(form)

    def checked_source(self) -> str:
        """Its text to write into files for other programs, whose sandbox may be none: refused where the template asks
        for what ours forbids or has no end, in a branch that two small conversations take or by a name in any branch.
        What else fails (roles it refuses, tools it wants) is no fault of its own."""
        names = {node.attr for node in self._parsed.find_all(jinja2.nodes.Getattr)}
        names |= {str(node.value) for node in self._parsed.find_all(jinja2.nodes.Const)}
        forbidden = next((f"names {found[1]}" for found in map(_PRIVATE.search, sorted(names)) if found), "")
        for messages in (_PROBE, _PROBE[1:]):
            for generate in (False, True):
                try:
                    self.render(messages[: -1 if generate else None], add_generation_prompt=generate)
                except Unbounded:
                    raise
                except GraftuneError as error:
                    if isinstance(error.__cause__, jinja2.exceptions.SecurityError):
                        forbidden = _one_line(error.__cause__)
        if forbidden:
            raise GraftuneError(
                f"the template reaches for Python's own objects ({forbidden}), so it is not carried on",
                where=self.name,
                fix="use another template",
            )
        return self.source

    @functools.cached_property
    def _parsed(self) -> jinja2.nodes.Template:
        return self._sandbox.parse(self.source)

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The names it reads from outside: messages, tools and its own."""
        return frozenset(jinja2.meta.find_undeclared_variables(self._parsed))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **extra: Any,
    ) -> str:
        """The conversation as text; `extra` reaches the template as variables (e.g. enable_thinking)."""
        variables: dict[str, Any] = {"bos_token": self.bos_token, "eos_token": self.eos_token, "documents": None}
        variables |= extra
        variables |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._sandbox.rendered(self._compiled, variables)
        except Endless as error:
            raise Unbounded(
                f"the template {error} over one conversation", where=self.name, fix="use another template"
            ) from None
        except _Refusal as refusal:
            raise GraftuneError(
                f"the template refuses this conversation: {_one_line(refusal)}",
                where=self.name,
                fix="change the messages to what the model accepts, or use another template",
            ) from refusal
        except Exception as error:
            # A template is a program of the user's model: whatever it raises (a missing key, a sandbox
            # violation, None + str) is a fault of template and messages together, reported in one sentence.
            raise GraftuneError(
                f"the template fails on this conversation: {type(error).__name__}, {_one_line(error)}",
                where=self.name,
                fix="check that every message has the fields the template reads, or use another template",
            ) from error

    def dated(self, now: datetime.datetime) -> ChatTemplate:
        """The same template at another date: a resumed run renders what it rendered on its first day."""
        return ChatTemplate(self.source, bos_token=self.bos_token, eos_token=self.eos_token, name=self.name, now=now)
