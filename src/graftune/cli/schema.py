"""graftune schema: the settings as a JSON schema for editors. graftune completion: a script for the shell.

Both are printed and nothing is installed: the user knows where the shell or the editor looks for such a file.
"""

from __future__ import annotations

import json
import typing
from typing import Any, Literal

from cyclopts import App

from graftune import __version__
from graftune.settings.config import leaves
from graftune.settings.sources import KEYS
from graftune.settings.values import Leaf, number_or_auto

Shell = Literal["bash", "zsh", "fish"]


def schema() -> int:
    """Print the JSON schema of a YAML file of settings, for completion and checks in editors.

    graftune schema > graftune.schema.json puts it where the first line of each run's config.yaml looks for it.
    """
    print(json.dumps(document(), indent=2, ensure_ascii=False))
    return 0


def completion(app: App, shell: Shell, /) -> int:
    """Print the completion script of a shell.

    bash: graftune completion bash >> ~/.bash_completion. zsh: graftune completion zsh > a file _graftune on the fpath.
    fish: graftune completion fish > ~/.config/fish/completions/graftune.fish.

    Parameters
    ----------
    shell
        The shell it is for.
    """
    print(app.generate_completion(prog_name="graftune", shell=shell))
    return 0


def document() -> dict[str, Any]:
    """Describes keys at the top level and under their sections; both are allowed."""
    flat = {leaf.name: _property(leaf) for leaf in leaves()}
    sections: dict[str, Any] = {}
    for leaf in leaves():
        empty = {"type": ["object", "null"], "additionalProperties": False, "properties": {}}
        sections.setdefault(leaf.section, empty)["properties"][leaf.name] = flat[leaf.name]
    either = {name: {"anyOf": [flat[name], section]} if name in flat else section for name, section in sections.items()}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"graftune {__version__}: settings of a run",
        "type": "object",
        "additionalProperties": False,
        "properties": {**flat, **either},
    }


def _property(leaf: Leaf) -> dict[str, Any]:
    found = {
        "description": leaf.help,
        "default": list(leaf.default) if isinstance(leaf.default, tuple) else leaf.default,
        **_type(leaf.name, leaf.type),
    }
    limits = {"minimum": leaf.min, "maximum": leaf.max, "exclusiveMinimum": leaf.above}
    return found | {key: limit for key, limit in limits.items() if limit is not None}


def _type(name: str, hint: Any) -> dict[str, Any]:
    origin = typing.get_origin(hint)
    if name in ("data", "eval_data"):
        source = {"type": "object", "required": ["path"], "properties": {key: {} for key in KEYS}}
        entry = {"anyOf": [{"type": "string"}, {**source, "additionalProperties": False}]}
        return {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "minItems": 1, "items": entry}]}
    if origin is Literal:
        return {"enum": list(typing.get_args(hint))}
    if origin is tuple:
        return {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}
    if origin is dict:
        inner = {"type": "string"} if typing.get_args(hint)[1] is str else {}
        return {"anyOf": [{"type": ["object", "null"], "additionalProperties": inner}, {"type": "string"}]}
    if (number := number_or_auto(hint)) is not None:
        return {"anyOf": [{"const": "auto"}, _type(name, number)]}
    if hint is float:  # 2e-4 without a dot is text in YAML
        return {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^[-+]?[0-9.]+([eE][-+]?[0-9]+)?$"}]}
    return {"type": {bool: "boolean", int: "integer", str: ["string", "null"]}[hint]}
