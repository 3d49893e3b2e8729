"""Chooses the chat template (the model's own, a Jinja file, or none) and probes it."""

from __future__ import annotations

import datetime
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graftune.data.format import ChatFormat, PlainTemplate
from graftune.data.probe import probe
from graftune.errors import GraftuneError
from graftune.io.files import open_plain
from graftune.settings.sections import DataConfig
from graftune.tokenizer import ChatTemplate, Tokenizer, examine


def chat_format(tokenizer: Tokenizer, config: DataConfig) -> ChatFormat | None:
    """The format `config.template` asks for. None: the model has no template and none was chosen (chat data fails)."""
    if config.template == "none":
        return probe(PlainTemplate(tokenizer), "template: none", tokenizer, append_eos=False)
    if config.template == "auto":
        if tokenizer.template is None:
            if tokenizer.template_fault is not None:
                raise tokenizer.template_fault
            return None
        template, name = tokenizer.template, tokenizer.template.name
    else:
        template, name = template_from_file(config.template, tokenizer), config.template
    if config.date:
        template = template.dated(day_of(config.date))
    check_variables(config.template_vars, template, name)
    return probe(template, name, tokenizer, append_eos=config.append_eos, variables=config.template_vars)


def usable_format(tokenizer: Tokenizer, config: DataConfig) -> ChatFormat:
    """The result of `chat_format`; for models without a template, the plain format of prompt/response records."""
    return chat_format(tokenizer, config) or plain_format(tokenizer)


def day_of(date: str) -> datetime.datetime:
    try:
        return datetime.datetime.strptime(date, "%Y-%m-%d")
    except ValueError:
        raise GraftuneError(f"date is {date!r}", fix="write it as YYYY-MM-DD") from None


def check_variables(given: Mapping[str, Any], template: ChatTemplate, name: str) -> None:
    """Refuse variables that the template does not read: a misspelt one would silently change nothing."""
    taken = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
    for variable in given:
        if variable in taken:
            raise GraftuneError(f"template_vars: {variable} is set by graftune", fix="remove it")
        if variable not in template.variables:
            known = ", ".join(sorted(template.variables - taken)) or "none"
            raise GraftuneError(
                f"template_vars: the chat template reads no variable {variable!r}",
                where=name,
                fix=f"the variables it reads are: {known}",
            )


def plain_format(tokenizer: Tokenizer) -> ChatFormat:
    """The format of prompt/response records for models without a template: a line break separates the two."""
    name = "none (the base has no chat template: prompt, line break, response)"
    return probe(PlainTemplate(tokenizer, between="\n"), name, tokenizer, append_eos=False)


def template_from_file(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    try:
        with open_plain(Path(name).expanduser()) as file:
            source = io.TextIOWrapper(file, encoding="utf-8-sig").read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise GraftuneError(
            f"the chat template cannot be read ({why})", where=name, fix="template is auto, none or a Jinja file"
        ) from None
    examine.check(examine.Untrusted("template", source, name))
    return ChatTemplate(
        source, bos_token=tokenizer.bos_token or "", eos_token=tokenizer.eos_token or "", name=Path(name).name
    )
