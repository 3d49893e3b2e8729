"""Every setting of a run, declared once.

One frozen tree of dataclasses. The YAML file, the command line's flags, the defaults, the help texts, the range
checks and the table in the README are all read off its fields, so an option cannot be declared and then forgotten.
Leaf names are unique across the tree: `--lr` needs no prefix, and a file may group keys under their section or
leave them flat. A key that no field reads is an error.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graftune.errors import GraftuneError
from graftune.io.files import write_file
from graftune.io.yaml_file import dump_yaml, read_yaml
from graftune.settings import other_tools
from graftune.settings.sections import (
    SHORTEST,
    BaseConfig,
    DataConfig,
    LoraConfig,
    OptimConfig,
    RlConfig,
    RunConfig,
    TrainConfig,
)
from graftune.settings.targets import SPELLINGS, expand_targets
from graftune.settings.values import Leaf, checked, shown

Note = Callable[[str], None]  # takes a note for the user


@dataclass(frozen=True)
class Config:
    """The whole tree. Build it with `Config.of`, which checks every key, type and range."""

    base: BaseConfig = field(default_factory=BaseConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)
    rl: RlConfig = field(default_factory=RlConfig)

    @staticmethod
    def of(*layers: dict[str, Any], where: str = "config", note: Note | None = None) -> Config:
        """Merge flat or sectioned dictionaries, later ones winning, over the defaults."""
        values: dict[str, Any] = {}
        for layer in layers:
            values.update(flatten(layer, where, note))
        return Config()._with(values, where)

    @staticmethod
    def load(path: str | Path, overrides: dict[str, Any] | None = None, note: Note | None = None) -> Config:
        return Config.of(read_yaml(path), overrides or {}, where=str(path), note=note)

    @staticmethod
    def of_run(folder: str | Path) -> Config:
        """The settings that a run folder holds."""
        path = Path(folder) / "config.yaml"
        if not path.is_file():
            what = "is not a run folder (no config.yaml)" if Path(folder).is_dir() else "there is no such run folder"
            raise GraftuneError(what, where=str(folder), fix="give a folder made by train")
        return Config.load(path)

    def replace(self, **changes: Any) -> Config:
        """A copy with these changes, which are checked; all other settings were checked before."""
        return self._with(flatten(changes, "config"), "config")

    def _with(self, values: dict[str, Any], where: str) -> Config:
        """A copy with these values for some leaves, which are checked."""
        given: dict[str, dict[str, Any]] = {}
        for leaf in leaves():
            if leaf.name in values:
                given.setdefault(leaf.section, {})[leaf.name] = _checked(leaf, values[leaf.name], where)
        changed = {name: dataclasses.replace(getattr(self, name), **section) for name, section in given.items()}
        return dataclasses.replace(self, **changed)

    def not_default(self, names: Iterable[str]) -> list[str]:
        """The settings among `names` that do not have their default value."""
        now, default = self.flat(), Config().flat()
        return [name for name in names if now[name] != default[name]]

    def flat(self) -> dict[str, Any]:
        return {name: value for section in self.nested().values() for name, value in section.items()}

    def nested(self) -> dict[str, dict[str, Any]]:
        return {
            name: {k: list(v) if isinstance(v, tuple) else v for k, v in vars(getattr(self, name)).items()}
            for name in _sections()
        }

    def save(self, path: str | Path) -> None:
        write_file(path, dump_yaml(self.nested()))


@functools.cache
def leaves() -> tuple[Leaf, ...]:
    """Every setting, in the order in which they are declared."""
    found = []
    for name, section in _sections().items():
        hints, default = typing.get_type_hints(section), section()
        for f in dataclasses.fields(section):
            found.append(Leaf(name, f.name, hints[f.name], getattr(default, f.name), **f.metadata))
    return tuple(found)


def flatten(tree: dict[str, Any], where: str, note: Note | None = None) -> dict[str, Any]:
    """Sectioned or flat keys -> leaf keys. A section and a leaf may share a name: a mapping is the section. Another
    tool's name for one of our settings is taken, and `note` gets a sentence about it."""
    flat: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    unknown: list[tuple[str, str]] = []
    known = section_of()
    for section, key, value in _entries(tree, where):
        shown_key = f"{section}.{key}" if section else str(key)
        name = key if key in known else other_tools.same(key) if isinstance(key, str) else None
        if name not in known or (section and known[name] != section):
            unknown.append((shown_key, _answer(str(key), name, known, section)))
            continue
        if name in flat:
            twice = f"{name} is given twice" + (f" (as {spelled[name]} and {key})" if spelled[name] != key else "")
            raise GraftuneError(twice, where=where, fix="keep one of them")
        if name != key:
            (note or _warn)(f"{where}: {shown_key} is taken as {name}")
        flat[name], spelled[name] = value, str(key)
    if len(unknown) == 1:
        raise GraftuneError(f"unknown key {shown(unknown[0][0])}", where=where, fix=unknown[0][1])
    if unknown:
        is_file = Path(where).suffix in (".yaml", ".yml", ".json")
        convert = is_file and other_tools.tool_of(map(str, tree))
        fix = f"graftune import {where} converts such a file" if convert else "change or remove them"
        lines = [f"{name}: {what}" for name, what in unknown]
        raise GraftuneError(f"{len(unknown)} unknown keys", where=where, fix=fix, lines=lines)
    return flat


def _entries(tree: dict[str, Any], where: str) -> Iterator[tuple[str, Any, Any]]:
    """The section (empty at the top level), key and value of each entry."""
    sections, known = _sections(), section_of()
    for key, value in tree.items():
        if key == "data" and isinstance(value, dict) and "path" in value:
            yield "", key, value  # one source of a mixture
        elif key in sections and (isinstance(value, dict) or (value is None and key not in known)):
            yield from ((key, inner, inner_value) for inner, inner_value in (value or {}).items())
        elif key in sections and key not in known:
            reply = other_tools.answer(key, flags=False) if isinstance(value, str | bool) else None
            what = "which is a setting of another tool" if reply else "and it is a section"
            fix = reply or "indent its keys below it"
            raise GraftuneError(f"{key} is {shown(value)}, {what}", where=where, fix=fix)
        else:
            yield "", key, value


def _answer(key: str, name: str | None, known: dict[str, str], section: str) -> str:
    """What to do about a key that is none of ours, or not one of its section."""
    if name in known:
        return f"{name} belongs to the section {known[name]}"
    there = [n for n, s in known.items() if s == section or not section]
    return other_tools.advice(key, there, flags=False) or "remove it; docs/settings.md lists all settings"


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


@functools.cache
def _sections() -> dict[str, Any]:
    return {f.name: typing.get_type_hints(Config)[f.name] for f in dataclasses.fields(Config)}


@functools.cache
def section_of() -> dict[str, str]:
    """The section of each setting, by its name."""
    return {leaf.name: leaf.section for leaf in leaves()}


def _checked(leaf: Leaf, value: Any, where: str) -> Any:
    value = checked(leaf, value, where)
    if leaf.name == "targets":
        value = tuple(SPELLINGS.get(target, target) for target in value)
        expand_targets(value, where)
    elif leaf.name == "out":
        value = os.path.expanduser(value)
    elif leaf.name == "max_seq_len" and 0 < value < SHORTEST:
        raise GraftuneError(f"max_seq_len is {value}", where=where, fix=f"it must be at least {SHORTEST}, or 0")
    elif leaf.name == "date" and value and not _is_date(value):
        raise GraftuneError(f"date is {shown(value)}", where=where, fix="write it as year-month-day, as 2026-11-17")
    return value


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
