"""The arguments of each command are assembled once a process: cyclopts does it anew for every command line, from the
annotations of some eighty settings, and for `train` that takes longer than most tests of a command line.

Every line gets copies without tokens or values, so that no line sees another's. Another version of cyclopts, which has
other parts, assembles them each time.
"""

from __future__ import annotations

import copy
from typing import Any

from cyclopts import App
from cyclopts.argument import ArgumentCollection

_assemble = App.assemble_argument_collection
_assembled: dict[tuple[int, bool], tuple[App, ArgumentCollection]] = {}


def assemble(self: App, *, default_parameter: Any = None, parse_docstring: bool = False) -> ArgumentCollection:
    if default_parameter is not None:
        return _assemble(self, default_parameter=default_parameter, parse_docstring=parse_docstring)
    key = id(self), parse_docstring
    if key not in _assembled:  # the app is kept too: another one could get its id
        _assembled[key] = self, _assemble(self, parse_docstring=parse_docstring)
    return copied(_assembled[key][1])


def copied(arguments: ArgumentCollection) -> ArgumentCollection:
    copies = {id(argument): copy.copy(argument) for argument in arguments}
    for argument in copies.values():
        argument.tokens = []
        argument.children = ArgumentCollection(copies[id(child)] for child in argument.children)
    return ArgumentCollection(copies.values())


def install() -> None:
    App.assemble_argument_collection = assemble  # type: ignore[method-assign]
