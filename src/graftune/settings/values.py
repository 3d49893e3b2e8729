"""Checks one setting's value against its type and range, and converts it from YAML or a flag to the config tree.

Nothing is guessed: the text '3' is not a number. A validation library would word its complaints for programmers; here
each names the setting, the value and what it must be.
"""

from __future__ import annotations

import datetime
import functools
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from graftune.errors import GraftuneError
from graftune.settings.sections import Resume
from graftune.settings.sources import DataValue
from graftune.settings.sources import checked as checked_data

AUTO = Literal["auto"]  # beside a number: the run chooses it

_WORDS = {"true": True, "false": False, "null": None}
_DEEPEST = 8  # levels of a value inside a mapping
_SHOWN = 200  # characters of a value in a message


@dataclass(frozen=True)
class Leaf:
    """One setting: a field of a section (sections.py) with its metadata."""

    section: str
    name: str
    type: Any
    default: Any
    help: str
    resume: Resume
    min: float | None
    max: float | None
    above: float | None  # an exclusive lower bound


def checked(leaf: Leaf, value: Any, where: str) -> Any:
    """`value` as the setting's type and within its range, or an error that names the setting."""
    value = coerced(leaf.name, leaf.type, value, where)
    if isinstance(value, int | float) and not isinstance(value, bool):
        check_range(leaf.name, value, leaf.min, leaf.max, leaf.above, where)
    return value


def check_range(
    name: str,
    value: float,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    where: str | None = None,
) -> None:
    """Refuse a number that is not finite or outside its bounds."""
    infinite = not isinstance(value, int) and not math.isfinite(value)
    low, high = least is not None and value < least, most is not None and value > most
    if infinite or low or high or (above is not None and value <= above):
        bounds = [(f"at least {least}", least), (f"above {above}", above), (f"at most {most}", most)]
        wanted = [text for text, bound in bounds if bound is not None]
        if infinite:
            wanted.insert(0, "a finite number")
        raise GraftuneError(f"{name} is {shown(value)}", where=where, fix=f"it must be {' and '.join(wanted)}")


@functools.cache
def number_or_auto(hint: Any) -> type[int] | type[float] | None:
    """The type of the number, if a field is a number or `auto`."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType) or AUTO not in typing.get_args(hint):
        return None
    (number,) = (kind for kind in typing.get_args(hint) if kind in (int, float))
    return number


def coerced(name: str, hint: Any, value: Any, where: str) -> Any:
    number = number_or_auto(hint)

    def wrong(expected: str) -> GraftuneError:
        either = ", or auto" if number else ""
        return GraftuneError(f"{name} is {shown(value)}", where=where, fix=f"it must be {expected}{either}")

    if hint == DataValue:
        return checked_data(name, value, where)
    if number and value == "auto":
        return value
    hint = number or hint
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        if isinstance(value, bool) and {"yes", "no"} <= set(choices):  # what YAML makes of either without quotes
            return "yes" if value else "no"
        if value not in choices:
            raise wrong("one of " + ", ".join(map(str, choices)))
        return value
    if origin is tuple:
        if isinstance(value, str):
            value = tuple(part.strip() for part in value.split(",") if part.strip())
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise wrong("a list of names")
        return tuple(value)
    if origin is dict:
        return _mapping(name, typing.get_args(hint)[1], value, where)
    if hint in (bool, int):
        if type(value) is not hint:
            raise wrong("true or false" if hint is bool else "a whole number")
        return value
    if hint is float:
        return _number(value, wrong)
    assert hint is str, hint
    if value is None:
        return ""
    if isinstance(value, datetime.date):  # what YAML makes of a date without quotes
        return value.isoformat()
    if not isinstance(value, str):
        raise wrong("text")
    return value


def shown(value: Any) -> str:
    """A value as a message quotes it: on one line, cut where it is long, and whatever its size."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python likes to print
        text = "a number of thousands of digits"
    except RecursionError:
        text = "something nested very deeply"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _number(value: Any, wrong: typing.Callable[[str], GraftuneError]) -> float:
    if isinstance(value, str):  # YAML reads 2e-4 (without a dot) as text
        try:
            return float(value)
        except ValueError:
            raise wrong("a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong("a number")
    try:
        return float(value)
    except OverflowError:
        raise wrong("a number that a double can hold") from None


def _mapping(name: str, kind: Any, value: Any, where: str) -> dict[str, Any]:
    """A YAML mapping, or `key=value,key=value` as a flag has it."""
    how = f"write {name} as key=value,key=value, or as a mapping in a YAML file"
    if value is None:
        return {}
    if isinstance(value, str):
        value = _pairs(name, value, kind, where, how)
    if not isinstance(value, dict):
        raise GraftuneError(f"{name} is {shown(value)}", where=where, fix=how)
    for key, inner in value.items():
        if not isinstance(key, str) or not key:
            raise GraftuneError(f"{name} has the key {shown(key)}, which is not a name", where=where, fix=how)
        if kind is str and (not isinstance(inner, str) or not inner):
            raise GraftuneError(f"{name}: {key} is {shown(inner)}", where=where, fix="it must be a name")
        if not _plain(inner, _DEEPEST):
            raise GraftuneError(
                f"{name}: {key} is {shown(inner)}", where=where, fix="it must be text, a number, true, false or a list"
            )
    return dict(value)


def _pairs(name: str, text: str, kind: Any, where: str, how: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key, value = key.strip(), value.strip()
        if not part.strip():
            continue
        if not key or not equals:
            raise GraftuneError(f"{name}: {shown(part.strip())} is not of the form key=value", where=where, fix=how)
        if key in found:
            raise GraftuneError(f"{name}: {key} is given twice", where=where, fix="give it once")
        found[key] = value if kind is str else scalar(value)
    return found


def scalar(text: str) -> Any:
    """The value of a flag: true, false, null and numbers are what they look like, all else is text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else text
    return text


def _plain(value: Any, levels: int) -> bool:
    """Whether a value consists of types that both YAML and JSON have, at most so many levels deep."""
    if isinstance(value, dict):
        return levels > 0 and all(isinstance(k, str) and _plain(v, levels - 1) for k, v in value.items())
    if isinstance(value, list):
        return levels > 0 and all(_plain(v, levels - 1) for v in value)
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
