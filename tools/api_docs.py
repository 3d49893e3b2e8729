"""What is written from the code of the Python API: settings/keywords.py (the keywords of open and train, from the
configuration's fields) and the body of docs/api.md (from the docstrings). tools/readme.py calls it; a test checks that
nothing is left to write."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from graftune.settings.config import leaves
from graftune.settings.sources import DataValue
from graftune.settings.values import Leaf, number_or_auto

SETTINGS = Path(__file__).resolve().parents[1] / "src" / "graftune" / "settings" / "keywords.py"
HEADER = '''"""The settings as keyword arguments, for type checkers and completion.

Written by tools/readme.py from the fields of sections.py: do not edit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict


class Settings(TypedDict, total=False):
'''
NAMED = ("base", "adapter", "loss")  # settings that are arguments of their own
VERBS = ("open", "train", "export")
RESULTS = ("Batch", "StepStats", "Sample", "EvalResult", "Dataset", "TrainResult", "Exported")  # what verbs give
TOOLS = ("Accumulator", "LossScaler")  # for loops of one's own
# A field of a class: its name, its type, perhaps a default, and what stands behind it.
FIELD = re.compile(r"    ([a-z]\w*): ([^=#]+?)(?: = .*?)?(?:  # (.*))?")


def settings_file() -> str:
    """Settings of open and train; those that are arguments of their own there are left out."""
    rows = [f"    {leaf.name}: {_type(leaf)}\n" for leaf in leaves() if leaf.name not in NAMED]
    return HEADER + "".join(rows)


def _type(leaf: Leaf) -> str:
    hint, origin = leaf.type, typing.get_origin(leaf.type)
    if hint == DataValue:
        return "str | PathLike[str] | Iterable[Mapping[str, Any]]"
    if (number := number_or_auto(hint)) is not None:
        return f'{number.__name__} | Literal["auto"]'
    if origin is Literal:
        return "Literal[" + ", ".join(f'"{choice}"' for choice in typing.get_args(hint)) + "]"
    if origin is tuple:
        return "Sequence[str]"
    if origin is dict:
        return f"Mapping[str, {_name(typing.get_args(hint)[1])}]"
    if leaf.name in ("template", "out"):
        return "str | PathLike[str]"
    return _name(hint)


def _name(hint: Any) -> str:
    return "Any" if hint is Any else hint.__name__


def api() -> str:
    """The body of docs/api.md."""
    module: Any = importlib.import_module("graftune.api")
    session: Any = importlib.import_module("graftune.session.session")
    parts = [_entry(f"graftune.{name}", getattr(module, name)) for name in VERBS]
    parts += [_entry("Session", module.Session, "## "), _table(module.Session, session.ATTRIBUTES)]
    parts += [_entry(f"session.{name}", getattr(module.Session, name)) for name in session.VERBS]
    for name in RESULTS:
        parts += [_entry(name, getattr(module, name), "## "), _table(getattr(module, name))]
    for name in TOOLS:
        parts += [_entry(name, getattr(module, name), "## "), _methods(getattr(module, name))]
    return "\n\n".join(parts)


def members(kind: type) -> dict[str, tuple[str, str]]:
    """What an object of a class has for its users: name -> (type, what it is), fields by the comments in the source,
    properties by their docstrings."""
    found: dict[str, tuple[str, str]] = {}
    for one in reversed(kind.__mro__[:-1]):
        for line in inspect.getsource(one).splitlines():
            if field := FIELD.fullmatch(line):
                found[field[1]] = field[2], field[3] or ""
        for name, value in vars(one).items():
            if isinstance(value, property) and not name.startswith("_"):
                hint = inspect.signature(value.fget).return_annotation  # type: ignore[arg-type]
                found[name] = str(hint), inspect.getdoc(value) or ""
    return found


def _table(kind: type, names: Sequence[str] = ()) -> str:
    known = members(kind)
    rows = [(name, *known[name]) for name in names or known]
    shown = (f"| `{name}` | `{hint}` | {' '.join(what.split())} |" for name, hint, what in rows)
    return "\n".join(["| | type | |", "|---|---|---|", *(row.replace(" | None`", " or None`") for row in shown)])


def _methods(kind: type) -> str:
    """A line for each method and property, with the first sentence of its docstring."""
    lines = []
    for name, value in vars(kind).items():
        what = value.fget if isinstance(value, property) else value
        if not name.startswith("_") and isinstance(what, types.FunctionType):
            call = "" if isinstance(value, property) else _signature(what)
            lines.append(f"- `{name}{call}`: {' '.join((inspect.getdoc(what) or '').split())}")
    return "\n".join(lines)


def _entry(name: str, what: Any, level: str = "### ") -> str:
    doc, signature = inspect.getdoc(what) or "", ""
    if isinstance(what, types.FunctionType):
        signature = f"\n\n```python\n{name}{_signature(what)}\n```"
    text, _, example = doc.partition("\nExample:\n")
    text = " ".join(text.split("\n\n")[0].split()) + "".join(
        "\n\n" + " ".join(part.split()) for part in text.strip().split("\n\n")[1:]
    )
    shown = f"\n\n```python\n{textwrap.dedent(example).rstrip()}\n```" if example else ""
    return f"{level}`{name}`{signature}\n\n{text}{shown}"


def _signature(function: types.FunctionType) -> str:
    """Without types, which the code has; settings stand for themselves."""
    known = {leaf.name for leaf in leaves()}
    found, starred = [], False
    verb = function.__name__ in ("open", "train")
    for p in inspect.signature(function).parameters.values():
        if p.name in ("self", "console", "overrides"):
            continue
        if verb and p.name in known and p.name not in NAMED:
            continue
        if p.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            found.append("*")
            starred = True
        default = "" if p.default is inspect.Parameter.empty else f"={_default(p.default)}"
        found.append(f"{p.name}{default}")
    return f"({', '.join([*found, '**settings'] if verb else found)})"


def _default(value: Any) -> str:
    return "..." if callable(value) else repr(value)
