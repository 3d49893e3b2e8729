"""Checks of the arguments of the Python API: a mistake is reported in one sentence that names the argument."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graftune.data.dataset import Dataset
from graftune.data.row import Refusal
from graftune.data.turns import Turns, check_turn_media
from graftune.errors import GraftuneError
from graftune.losses import Loss
from graftune.settings.config import leaves
from graftune.settings.values import checked

Message = Mapping[str, Any]
Conversation = list[dict[str, Any]]
# Numbers alone: `auto` is resolved before a step.
_OPTIM = {leaf.name: dataclasses.replace(leaf, type=float) for leaf in leaves() if leaf.section == "optim"}


def kind(value: object) -> str:
    """A value's type with its article."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def path_text(value: object, name: str) -> str:
    if not isinstance(value, str | os.PathLike):
        raise GraftuneError(f"{name} is {kind(value)}", fix="give a path or a name")
    return os.fspath(value)


def path(value: object) -> Path:
    return Path(path_text(value, "path"))


def whole_number(value: object, name: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise GraftuneError(f"{name} is {value!r}", fix=f"it must be a whole number of at least {least}")
    return int(value)


def above_zero(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise GraftuneError(f"{name} is {value!r}", fix="it must be a number above 0")
    return float(value)


def data_set(value: object, verb: str) -> Dataset:
    if not isinstance(value, Dataset):
        raise GraftuneError(
            f"{verb} was given {kind(value)}", fix="give it what session.prepare(data) returns, as the data"
        )
    return value


def hyperparameters(given: Mapping[str, float | None]) -> dict[str, float]:
    """The values that are given, checked against the ranges of the settings."""
    found = {}
    for name, value in given.items():
        if value is not None:
            plain = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else value
            found[name] = checked(_OPTIM[name], plain, "optim_step")
    return found


def a_loss(value: object) -> Loss:
    if isinstance(value, type) and issubclass(value, Loss):
        raise GraftuneError(f"loss is the class {value.__name__}", fix=f"give an object, as {value.__name__}()")
    if not isinstance(value, Loss):
        raise GraftuneError(f"loss is {kind(value)}", fix="give a loss by name, or an object of a graftune.losses.Loss")
    return value


# Text


def stop_strings(given: object) -> tuple[str, ...]:
    each = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    for text in each:
        if not isinstance(text, str) or not text:
            what = "an empty text" if text == "" else kind(text)
            raise GraftuneError(f"stop has {what} in it", fix="give texts of at least one character")
    return each


def is_conversation(given: object) -> bool:
    several = isinstance(given, Sequence) and not isinstance(given, str)
    return several and bool(given) and all(isinstance(entry, Mapping) for entry in given)  # type: ignore[attr-defined]


def conversation(given: Sequence[Message]) -> Conversation:
    """Messages in the form that templates read, as in training data; unlike there, a text may be blank."""
    turns = Turns()
    try:
        for place, message in enumerate(given, 1):
            check_turn_media(message, place)
            if isinstance(message.get("role"), str) and isinstance(message.get("content"), str):
                turns.add(dict(message))
            else:
                turns.convert(dict(message))
    except Refusal as refusal:
        raise GraftuneError(refusal.text, where="the conversation", fix="give each message a role and text") from None
    return turns.messages


def prompt(given: object, name: str = "the prompt") -> str | Conversation:
    if isinstance(given, str):
        return given
    if not is_conversation(given):
        raise GraftuneError(
            f"{name} is {kind(given)}", fix="give a text, or a conversation: a list of {'role': ..., 'content': ...}"
        )
    return conversation(given)  # type: ignore[arg-type]  # checked above


def prompts(given: object) -> list[str | Conversation]:
    """A list of prompts, of which one may be given alone."""
    if isinstance(given, str) or is_conversation(given) or not isinstance(given, Iterable):
        return [prompt(given)]
    return [prompt(one, f"prompt {number}") for number, one in enumerate(given, 1)]


def texts(given: object) -> list[str]:
    """A list of texts to continue, of which one may be given alone."""
    each = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    for one in each:
        if not isinstance(one, str):
            raise GraftuneError(
                f"generate was given {kind(one)}, and continues text", fix="use chat or sample for conversations"
            )
    return each  # type: ignore[return-value]  # checked above


def turns(given: object) -> Conversation:
    """A conversation; a text becomes its first user turn."""
    found = prompt([{"role": "user", "content": given}] if isinstance(given, str) else given, "the conversation")
    assert not isinstance(found, str)
    return found
