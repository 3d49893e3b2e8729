"""A YAML file of settings: read within limits, written with its schema named.

PyYAML's safe loader takes everything that is valid: aliases that stand for billions of values, keys that occur twice
(the last wins), nesting until Python's stack ends. So the tree of nodes is checked before values are made of it.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from graftune.errors import GraftuneError
from graftune.io.files import open_plain

LARGEST = 1 << 18  # bytes; a file of settings has a few thousand
MOST = 10_000  # values, with those behind aliases counted as often as they are named
DEEPEST = 30
_INHERITED = re.compile(r"/dev/(stdin|fd/\d+)|/proc/self/fd/\d+")  # -c <(command): a pipe on purpose
HEADER = """\
# yaml-language-server: $schema=graftune.schema.json
# (For completion and checks in an editor, make that file: graftune schema > graftune.schema.json)
"""


def dump_yaml(tree: dict[str, Any]) -> str:
    return HEADER + dump_values(tree)


def dump_values(tree: dict[str, Any]) -> str:
    """YAML without the header. Uses libyaml if PyYAML was built with it: four times as fast, and the same text."""
    import yaml

    dumper = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper
    return str(yaml.dump(tree, Dumper=dumper, sort_keys=False, allow_unicode=False))


def read_yaml(path: str | Path) -> dict[str, Any]:
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, where: str, most: int = MOST) -> dict[str, Any]:
    """The keys and values of a text of settings; messages call it `where`. It may hold `most` values."""
    tree = _constructed(text, where, most)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise GraftuneError("must hold keys and values", where=where, fix="write one `key: value` per line")
    return tree


def read_text(path: str | Path, largest: int = LARGEST) -> str:
    try:
        with open(path, "rb") if _INHERITED.fullmatch(str(path)) else open_plain(path) as file:
            raw = file.read(largest + 1)
    except OSError as error:
        raise GraftuneError(
            f"cannot be read ({error.strerror})", where=str(path), fix="check the path of the settings"
        ) from None
    if len(raw) > largest:
        raise GraftuneError(
            "is too large for a file of settings", where=str(path), fix="check the path of the settings"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise GraftuneError("is not valid YAML (not UTF-8)", where=str(path), fix="save it as UTF-8") from None


def _constructed(text: str, where: str, most: int) -> Any:
    import yaml

    try:
        loader = _loader()(text)  # raises for a character that YAML does not allow
        node = loader.get_single_node()
        _check(node, where, most)
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise GraftuneError(f"is not valid YAML{line}", where=where, fix="fix the file") from None
    except RecursionError:
        raise _too_deep(where) from None
    except GraftuneError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError):
        # A number of thousands of digits, a date such as 2026-13-45, a tag that does not fit its value.
        raise GraftuneError("holds a value that cannot be read", where=where, fix="check its numbers") from None


@functools.cache
def _loader() -> Any:
    """PyYAML's safe loader with libyaml's parser, where PyYAML was built with it: five times as fast. Its own composer
    comes first, since libyaml's crashes on deep nesting."""
    import yaml

    if not yaml.__with_libyaml__:
        return yaml.SafeLoader

    class FastSafeLoader(yaml.composer.Composer, yaml.CSafeLoader):
        def __init__(self, text: str):
            yaml.CSafeLoader.__init__(self, text)
            yaml.composer.Composer.__init__(self)

    return FastSafeLoader


def _check(root: Any, where: str, most: int) -> None:
    """Refuses a tree of nodes that is nested too deeply, holds too much or has a key twice. Nodes behind aliases count
    as often as they are named, and an alias of itself has no end."""
    import yaml

    waiting, count = [(root, 0)] if root is not None else [], 0
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if depth > DEEPEST:
            raise _too_deep(where)
        if count > most:
            raise GraftuneError("holds too many values", where=where, fix="keep to settings, without aliases")
        if isinstance(node, yaml.MappingNode):
            _check_keys(node, where)
            waiting += [(inner, depth + 1) for pair in node.value for inner in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(inner, depth + 1) for inner in node.value]


def _check_keys(node: Any, where: str) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines and name != "<<":
            what = f"{name[:80]} is given twice, at lines {lines[name]} and {line}"
            raise GraftuneError(what, where=where, fix="keep one of them")
        lines[name] = line


def _too_deep(where: str) -> GraftuneError:
    return GraftuneError("is nested too deeply", where=where, fix="settings are one or two levels deep")
