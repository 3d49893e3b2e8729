"""Chat templates: the model's own Jinja, rendered in a sandbox.

`ChatTemplate` turns messages into the text that the model was trained on, with the environment that transformers
documents for chat templates (sandbox.py), so a template renders the same bytes here. The date is fixed when the
template is built: a template that prints today's date renders the same text during the whole run. Rejected: hand
written renderers per family, which drift from what the model saw.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes

from graftune.errors import GraftuneError
from graftune.tokenizer.sandbox import TemplateRefusal, compiled, environment

LONGEST_REASON = 10_000  # characters of an error's text that are looked at
_PRIVATE = re.compile(r"(?:^|[.\[])(__[a-z_]+__)(?:$|[].:!}[])")  # by itself, or in the fields of a format
_PROBE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
]


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
        self._fixed: dict[str, Any] = {"bos_token": bos_token, "eos_token": eos_token, "documents": None}
        self._fixed["strftime_now"] = self.now.strftime
        try:
            self._compiled = compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise GraftuneError(
                f"the template does not parse: {_one_line(error.message)}",
                where=f"{name}, line {error.lineno}",
                fix="fix the Jinja source, or set template to another file",
            ) from error
        except (jinja2.TemplateError, RecursionError, ValueError, SyntaxError) as error:
            # The last three come from Python's own compiler, for sources nested too deep or with odd literals.
            raise GraftuneError(f"the template does not compile: {_one_line(error)}", where=name) from error

    def checked_source(self) -> str:
        """The source to write into files for other programs, which may have no sandbox. A template that reaches for
        Python's objects is refused: by a name in any branch, or when two small conversations are rendered. Other
        failures (a role it refuses, tools it needs) are accepted."""
        names = {node.attr for node in self._parsed.find_all(jinja2.nodes.Getattr)}
        names |= {str(node.value) for node in self._parsed.find_all(jinja2.nodes.Const)}
        forbidden = next((f"names {found[1]}" for found in map(_PRIVATE.search, sorted(names)) if found), "")
        for messages in (_PROBE, _PROBE[1:]):
            for generate in (False, True):
                try:
                    self.render(messages[: -1 if generate else None], add_generation_prompt=generate)
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
        return environment().parse(self.source)

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The names that it reads from outside: messages, tools and its own variables."""
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
        own = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._compiled.render(self._fixed | extra | own)
        except TemplateRefusal as refusal:
            raise GraftuneError(
                f"the template refuses this conversation: {_one_line(refusal)}",
                where=self.name,
                fix="change the messages to what the model accepts, or use another template",
            ) from refusal
        except Exception as error:
            # A template may raise anything: a missing key, a sandbox violation, None + str.
            raise GraftuneError(
                f"the template fails on this conversation: {type(error).__name__}, {_one_line(error)}",
                where=self.name,
                fix="check that every message has the fields the template reads, or use another template",
            ) from error

    def dated(self, now: datetime.datetime) -> ChatTemplate:
        """The same template at another date: a resumed run renders what it rendered on its first day."""
        return ChatTemplate(self.source, bos_token=self.bos_token, eos_token=self.eos_token, name=self.name, now=now)


def base_template(
    source: str, fault: GraftuneError | None, *, bos_token: str, eos_token: str, name: str
) -> tuple[ChatTemplate | None, GraftuneError | None]:
    """The chat template in a base's files, or why it cannot be used; `fault` is what its trial found (examine.py). Such
    a base opens without the template, and the error is raised where that template would be used."""
    if fault is not None:
        return None, fault
    try:
        return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token, name=name), None
    except GraftuneError as error:
        return None, error
