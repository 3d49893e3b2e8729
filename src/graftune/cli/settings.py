"""Flags from the config tree: one per leaf, made at import, never written by hand.

A command names the sections (or single leaves) it understands with `@takes("base", "data")` and receives an object in
whose fields None means "not given"; `given()` turns it into the dictionary that `Config.of` lays over file and
defaults. Declaring the flags by hand beside the dataclasses would be quicker to read and sure to drift: a new field
here is a new flag, with the field's own help, default and range.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import Group, Parameter, Token

from graftune.cli.help import SettingsPanel
from graftune.errors import GraftuneError
from graftune.io.yaml_file import dump_yaml
from graftune.observe.console import Console
from graftune.settings import recognise
from graftune.settings.config import Config, leaves
from graftune.settings.sources import DataValue, entries
from graftune.settings.values import Leaf, number_or_auto

Command = TypeVar("Command", bound=Callable[..., Any])

_TITLES = {
    "base": "Base model",
    "lora": "Adapter",
    "data": "Data",
    "optim": "Optimizer",
    "train": "Training",
    "run": "Run folder and samples",
    "rl": "Reinforcement learning",
}
_GROUPS = {
    name: Group(title, sort_key=10 + place, help_formatter=SettingsPanel())
    for place, (name, title) in enumerate(_TITLES.items())
}


def takes(*names: str, omit: Sequence[str] = ()) -> Callable[[Command], Command]:
    """Give a command a `settings` parameter with the flags of these sections and leaves."""
    chosen = [leaf for leaf in leaves() if (leaf.section in names or leaf.name in names) and leaf.name not in omit]
    unknown = {*names, *omit} - {leaf.section for leaf in leaves()} - {leaf.name for leaf in leaves()}
    assert not unknown, f"no such section or setting: {unknown}"

    def dressed(command: Command) -> Command:
        flags = dataclasses.make_dataclass(
            f"{command.__name__.title()}Settings",
            [(leaf.name, Annotated[_typed(leaf) | None, _parameter(leaf)], None) for leaf in chosen],
            frozen=True,
            kw_only=True,
        )
        # Without a module of ours cyclopts takes the class for a builtin and does not look inside it.
        flags.__module__, flags.__doc__ = __name__, ""
        command.__annotations__["settings"] = Annotated[flags, Parameter(name="*")]
        return command

    return dressed


def given(settings: Any) -> dict[str, Any]:
    """The settings from the command line, checked one by one so that an error names its flag."""
    if settings is None:
        return {}
    values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    flags = {name: _joined(name, value) for name, value in values.items() if value is not None}
    for name, value in flags.items():
        try:
            Config.of({name: value})
        except GraftuneError as error:
            raise GraftuneError(f"{flag(name)}{error.what.removeprefix(name)}", fix=error.fix) from None
    return flags


def _joined(name: str, value: Any) -> Any:
    """A repeated flag as one value. Names of files may contain commas."""
    if name in ("data", "eval_data"):
        return value[0] if len(value) == 1 else list(value)
    return ",".join(value) if isinstance(value, tuple) else value


def loaded(config: str, flags: dict[str, Any], console: Console) -> Config:
    """Flags override the file, which overrides the defaults."""
    return Config.load(config, flags, note=console.note) if config else Config.of(flags)


def looked_at(whole: Config) -> Config:
    """The settings with their paths and names checked, before torch is imported."""
    base, data = whole.base.base, whole.data
    recognise.check_adapter(whole.lora.adapter)
    if base or not whole.lora.adapter:  # an adapter names its base
        base = recognise.check_base(base, scratch=whole.train.method == "scratch")
    for source in (*entries(data.data), *entries(data.eval_data)):
        recognise.check_data(source.path)
    recognise.check_template(data.template)
    out = Path(whole.run.out) if whole.run.out else None
    if out is not None and (files := [path for path in (out, *out.parents) if path.is_file()]):
        what = f"cannot be written to ({files[0]} is a file)"
        raise GraftuneError(what, where=str(out), fix="choose another folder with --out")
    return whole.replace(base=base) if base != whole.base.base else whole


def show_config(config: Config, console: Console) -> int:
    console.result(config.nested())
    if not console.json:
        console.stream(dump_yaml(config.nested()))
    return 0


def positional(flags: dict[str, Any], *, base: str = "", data: str = "", more: Sequence[str] = ()) -> dict[str, Any]:
    """`flags` with the positional settings BASE and DATA; giving both is a mistake."""
    merged = dict(flags)
    for name, value in (("base", base), ("data", [data, *more] if more else data)):
        if value and merged.setdefault(name, value) != value:
            raise GraftuneError(
                f"{name.upper()} is {value!r} but {flag(name)} is {merged[name]!r}", fix="give only one of the two"
            )
    return merged


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def whole_number(_type: Any, tokens: Sequence[Token]) -> int:
    """Refuses 1.5, which cyclopts would round to 2."""
    if not re.fullmatch(r"[+-]?\d+", tokens[0].value):
        raise ValueError(f'"{tokens[0].value}" is not a whole number')
    return int(tokens[0].value)


def or_auto(kind: Callable[[str], float]) -> Callable[[Any, Sequence[Token]], Any]:
    """Takes a number of that kind, or the word auto; other text goes on to the check of the setting."""

    def convert(_type: Any, tokens: Sequence[Token]) -> Any:
        try:
            return kind(tokens[0].value)
        except ValueError:
            return tokens[0].value

    return convert


Count = Annotated[int, Parameter(converter=whole_number)]
Switch = Annotated[bool, Parameter(negative="", show_default=False)]


def _typed(leaf: Leaf) -> Any:
    """The type of a leaf's flag: a mapping comes as texts of the form key=value, several sources as a repeated flag,
    a number or auto as either."""
    if number_or_auto(leaf.type):
        return str
    return tuple[str, ...] if typing.get_origin(leaf.type) is dict or leaf.type == DataValue else leaf.type


def _parameter(leaf: Leaf) -> Parameter:
    is_list = typing.get_origin(leaf.type) in (tuple, dict) or leaf.type == DataValue
    number = number_or_auto(leaf.type)
    return Parameter(
        name=flag(leaf.name),
        help=leaf.help + (f" [default: {shown}]" if (shown := _shown(leaf.default)) else ""),
        group=_GROUPS[leaf.section],
        converter=or_auto(number) if number else whole_number if leaf.type is int else None,
        negative=None if leaf.type is bool else "",
        consume_multiple=False if is_list else None,
        show_default=False,
        show_choices=typing.get_origin(leaf.type) is Literal,
    )


def _shown(default: Any) -> str:
    if isinstance(default, float) and default.is_integer():
        return str(int(default))
    if isinstance(default, tuple | dict):
        return ",".join(default)
    if isinstance(default, bool):
        return "yes" if default else "no"
    return str(default)
