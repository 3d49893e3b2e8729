"""The values that `data` and `eval_data` take: one path or name, or a list of sources with weights.

The setting stays plain data (text, or a tuple of mappings), because it is written to YAML and read back, compared on
resume and shown by --print-config; `entries` turns it into `Source` objects where data is read. A class of our own in
the settings tree would need a conversion in each of those places.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from graftune.errors import GraftuneError

DataValue = str | tuple[dict[str, Any], ...]
GLOB = frozenset("*?[")
MOST = 1000  # times that a row may occur per epoch


@dataclass(frozen=True)
class Source:
    """One entry. `weight` 2: every row occurs twice per epoch; 0.5: half of the rows occur, chosen once and for all."""

    path: str
    weight: float = 1.0
    split: str = ""
    subset: str = ""
    revision: str = ""
    map: dict[str, str] | None = None  # the `map` of the settings


KEYS = tuple(field.name for field in fields(Source))


def entries(value: DataValue) -> list[Source]:
    return [Source(value)] if isinstance(value, str) else [Source(**entry) for entry in value]


def checked(name: str, value: Any, where: str | None = None) -> DataValue:
    """The value of `data` or `eval_data` in its plain form; GraftuneError says what is wrong with it."""

    def wrong(what: str, fix: str) -> GraftuneError:
        return GraftuneError(f"{name}{what}", where=where, fix=fix)

    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list | tuple):
        raise wrong(f" is {value!r}", "it must be a path, a Hub data set, or a list of them")
    if not value:
        raise wrong(" is an empty list", "name at least one file")
    result = tuple(_entry(entry, place, wrong) for place, entry in enumerate(value, 1))
    return result[0]["path"] if len(result) == 1 and len(result[0]) == 1 else result


def _entry(entry: Any, place: int, wrong: Callable[[str, str], GraftuneError]) -> dict[str, Any]:
    if isinstance(entry, str):
        entry = {"path": entry}
    if not isinstance(entry, dict):
        raise wrong(f"[{place}] is {entry!r}", "each source is a path or {path: ..., weight: ...}")
    unknown = [key for key in entry if key not in KEYS]
    if unknown:
        raise wrong(f"[{place}] has the unknown key {unknown[0]!r}", f"a source takes {', '.join(KEYS)}")
    if not isinstance(entry.get("path"), str) or not entry["path"]:
        raise wrong(f"[{place}] has no path", "name its file, folder, glob or Hub data set with path")
    kept: dict[str, Any] = {"path": entry["path"]}
    weight = entry.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise wrong(f"[{place}] has the weight {weight!r}", "a weight is a number such as 2 or 0.5")
    if not 0 < weight <= MOST:
        raise wrong(f"[{place}] has the weight {weight}", f"a weight is above 0 and at most {MOST}")
    if weight != 1:
        kept["weight"] = weight
    for key in ("split", "subset", "revision"):
        text = entry.get(key)
        if text is not None and not isinstance(text, str):
            raise wrong(f"[{place}] has the {key} {text!r}", f"a {key} is a name")
        if text:
            kept[key] = text
    renamed = entry.get("map")
    if renamed is not None:
        if not isinstance(renamed, dict) or not all(isinstance(x, str) for pair in renamed.items() for x in pair):
            raise wrong(f"[{place}] has the map {renamed!r}", "a map is written {prompt: Question, response: Answer}")
        kept["map"] = dict(renamed)
    return kept


def absolute(value: DataValue) -> DataValue:
    """Local paths and globs in full, so that a run can be resumed from another folder. Hub names stay."""
    if isinstance(value, str):
        return _absolute(value)
    return tuple({**entry, "path": _absolute(entry["path"])} for entry in value)


def _absolute(path: str) -> str:
    local = Path(path).expanduser()
    if not path or not (local.exists() or (GLOB & set(path) and "://" not in path)):
        return path
    return str(local.resolve() if local.exists() else Path.cwd() / local)


def label(value: DataValue) -> str:
    """A short name for messages and run folders."""
    if isinstance(value, str):
        return value
    more = len(value) - 1
    return str(value[0]["path"]) + (f" and {more} more" if more else "")


def slug(value: DataValue) -> str:
    """A part of a folder's name, from the name of the first source."""
    path = value if isinstance(value, str) else value[0]["path"]
    return re.sub(r"[^\w.-]+", "-", Path(path).name.split(".")[0]).strip("-") or "data"
