"""A YAML file of settings: read within limits, written with its schema named.

PyYAML's safe loader takes everything that is valid: aliases that stand for billions of values, keys that occur twice
(the last wins), nesting until Python's stack ends. So depth and number of the nodes are counted while they are read,
and the tree is measured, with what stands behind aliases, before values are made of it.
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
_INHERITED = re.compile(r"/dev/(stdin|fd/\d+)|/proc/self/fd/\d+")  # -c <(command): a pipe, and it is meant
HEADER = """\
# yaml-language-server: $schema=graftune.schema.json
# (For completion and checks in an editor, make that file: graftune schema > graftune.schema.json)
"""


def dump_yaml(tree: dict[str, Any]) -> str:
    import yaml

    return HEADER + yaml.safe_dump(tree, sort_keys=False, allow_unicode=False)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The keys and values of a file of settings."""
    return parse_yaml(_text(path), str(path))


def parse_yaml(text: str, where: str, most: int = MOST) -> dict[str, Any]:
    """The keys and values of a text of settings; messages call it `where`. It may hold `most` values."""
    tree = _constructed(text, where, most)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise GraftuneError("must hold keys and values", where=where, fix="write one `key: value` per line")
    return tree


def _text(path: str | Path) -> str:
    try:
        with open(path, "rb") if _INHERITED.fullmatch(str(path)) else open_plain(path) as file:
            raw = file.read(LARGEST + 1)
    except OSError as error:
        raise GraftuneError(
            f"cannot be read ({error.strerror})", where=str(path), fix="check the path of the settings"
        ) from None
    if len(raw) > LARGEST:
        raise GraftuneError(
            "is too large for a file of settings", where=str(path), fix="check the path of the settings"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise GraftuneError("is not valid YAML (not UTF-8)", where=str(path), fix="save it as UTF-8") from None


def _constructed(text: str, where: str, most: int) -> Any:
    import yaml

    loader = None
    try:
        loader = _loader()(text, where, most)
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, where, most)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise GraftuneError(f"is not valid YAML{line}", where=where, fix="fix the file") from None
    except RecursionError:
        raise _too_deep(where) from None
    except GraftuneError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError):
        # A number of thousands of digits, a date such as 2026-13-45, a tag on a value that is none of its kind.
        raise GraftuneError("holds a value that cannot be read", where=where, fix="check its numbers") from None
    finally:
        if loader is not None:
            loader.dispose()


@functools.cache
def _loader() -> Any:
    import yaml

    class Bounded(yaml.SafeLoader):
        """Stops where a file is nested too deeply or holds too much: its scanner takes quadratic time there."""

        def __init__(self, text: str, where: str, most: int):
            super().__init__(text)
            self.where, self.left, self.depth = where, most, 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth, self.left = self.depth + 1, self.left - 1
            if self.depth > DEEPEST + 1:
                raise _too_deep(self.where)
            if self.left < 0:
                raise GraftuneError("holds too many values", where=self.where, fix="keep to settings")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    return Bounded


def _too_deep(where: str) -> GraftuneError:
    return GraftuneError("is nested too deeply", where=where, fix="settings are one or two levels deep")


def _measure(root: Any, where: str, most: int) -> None:
    """Refuses what would grow without bound, and keys that stand there twice."""
    import yaml

    sizes: dict[int, int] = {}  # of nodes that are done; an open one has 0

    def size(node: Any, depth: int) -> int:
        if id(node) in sizes:
            if not sizes[id(node)]:
                raise GraftuneError("holds an alias of itself", where=where, fix="write the values out")
            return sizes[id(node)]
        if depth > DEEPEST:
            raise _too_deep(where)
        sizes[id(node)] = 0
        parts: list[Any] = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
            _no_twins(node, where)
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        total = 1
        for part in parts:
            total += size(part, depth + 1)
            if total > most:
                raise GraftuneError("holds too many values", where=where, fix="write them out without aliases")
        sizes[id(node)] = total
        return total

    size(root, 0)


def _no_twins(node: Any, where: str) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines and name != "<<":
            raise GraftuneError(
                f"{name[:80]} is given twice, at lines {lines[name]} and {line}", where=where, fix="keep one of them"
            )
        lines[name] = line
