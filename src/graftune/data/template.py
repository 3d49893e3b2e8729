"""Which chat template is used: the model's own, a Jinja file, or none; and what probing tells about it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graftune.config import DataConfig
from graftune.data.format import ChatFormat, PlainTemplate, special_pattern, special_tokens, stop_ids
from graftune.data.probe import probe
from graftune.errors import GraftuneError
from graftune.tokenizer import ChatTemplate, Tokenizer

__all__ = [
    "ChatFormat",
    "chat_format",
    "plain_format",
    "special_pattern",
    "special_tokens",
    "stop_ids",
    "usable_format",
]


def chat_format(tokenizer: Tokenizer, config: DataConfig) -> ChatFormat | None:
    """The format `config.template` asks for. None: the model has no template and none was chosen (chat data fails)."""
    if config.template == "none":
        return probe(PlainTemplate(tokenizer), "template: none", tokenizer, append_eos=False)
    if config.template == "auto":
        if tokenizer.template is None:
            return None
        template, name = tokenizer.template, getattr(tokenizer.template, "name", "chat template")
    else:
        template, name = template_from_file(config.template, tokenizer), config.template
    if config.date:
        template = template.dated(day_of(config.date))
    return probe(
        template, name, tokenizer, append_eos=config.append_eos, variables=template_variables(config.template_vars)
    )


def usable_format(tokenizer: Tokenizer, config: DataConfig) -> ChatFormat:
    """The same, and for models without a template what their prompt/response records are trained with."""
    return chat_format(tokenizer, config) or plain_format(tokenizer)


def day_of(date: str) -> datetime.datetime:
    try:
        return datetime.datetime.strptime(date, "%Y-%m-%d")
    except ValueError:
        raise GraftuneError(f"date is {date!r}", mend="write it as YYYY-MM-DD") from None


def template_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values as templates expect them: on the command line everything is text, and `false` there means false."""
    known = {"true": True, "false": False, "null": None, "none": None}
    taken = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
    for name in given:
        if name in taken:
            raise GraftuneError(f"template_vars: {name} is set by graftune", mend="remove it")

    def value(raw: Any) -> Any:
        if not isinstance(raw, str):
            return raw
        if raw.lower() in known:
            return known[raw.lower()]
        return int(raw) if re.fullmatch(r"-?[0-9]{1,15}", raw) else raw

    return {name: value(raw) for name, raw in given.items()}


def plain_format(tokenizer: Tokenizer) -> ChatFormat:
    """For prompt/response records of models without a template: a line break parts the two."""
    name = "none (the base has no chat template: prompt, line break, response)"
    return probe(PlainTemplate(tokenizer, between="\n"), name, tokenizer, append_eos=False)


def template_from_file(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    try:
        source = Path(name).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise GraftuneError(
            f"the chat template cannot be read ({why})", where=name, mend="template is auto, none or a Jinja file"
        ) from None
    return ChatTemplate(
        source, bos_token=tokenizer.bos_token or "", eos_token=tokenizer.eos_token or "", name=Path(name).name
    )
