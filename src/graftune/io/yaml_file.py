"""A YAML file of settings: read within limits, written with its schema named.

PyYAML's safe loader takes everything that is valid: aliases that stand for billions of values, keys that occur twice
(the last wins), nesting until Python's stack ends. So the loader counts depth and values, with those behind aliases,
while it reads, before it makes values of them.
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
    return HEADER + dump_values(tree)


def dump_values(tree: dict[str, Any]) -> str:
    """Without the header."""
    import yaml

    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=False))


def read_yaml(path: str | Path) -> dict[str, Any]:
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, where: str, most: int = MOST, *, quick: bool = False) -> dict[str, Any]:
    """The keys and values of a text of settings; messages call it `where`. It may hold `most` values. `quick`: read a
    text without aliases by PyYAML's C parser, which is ten times as fast and of two equal keys takes the last."""
    tree = _constructed(text, where, most, quick and "*" not in text)
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


def _constructed(text: str, where: str, most: int, quick: bool) -> Any:
    import yaml

    loader = None
    try:
        if quick:
            return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 (both are safe)
        loader = _loader()(text, where, most)  # it fails here where a character is not allowed
        return loader.get_single_data()
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
    finally:
        if loader is not None:
            loader.dispose()


@functools.cache
def _loader() -> Any:
    import yaml

    # libyaml turns a text into events five times as fast as PyYAML's own scanner, where PyYAML was built with it.
    # Composer comes first: libyaml's parser has a `compose_node` of its own, which counts nothing.
    bases: tuple[Any, ...] = (yaml.SafeLoader,)
    if yaml.__with_libyaml__:
        bases = (yaml.composer.Composer, yaml.CSafeLoader)

    class BoundedLoader(*bases):  # type: ignore[misc]
        """Stops where a file is nested too deeply, holds too much or has a key twice. It counts while it reads, because
        PyYAML's scanner takes quadratic time on such a file."""

        def __init__(self, text: str, where: str, most: int):
            bases[-1].__init__(self, text)
            yaml.composer.Composer.__init__(self)
            self.where, self.most = where, most
            self.depth, self.count = 0, 0  # levels above this node; values read so far, with those behind aliases
            self.sizes: dict[int, int] = {}  # values in each finished node

        def compose_node(self, parent: Any, index: Any) -> Any:
            is_alias = self.check_event(yaml.AliasEvent)
            before = self.count
            self.depth, self.count = self.depth + 1, self.count + 1
            if self.depth > DEEPEST + 1:
                raise _too_deep(self.where)
            node = super().compose_node(parent, index)
            if is_alias:
                if id(node) not in self.sizes:
                    raise GraftuneError("holds an alias of itself", where=self.where, fix="write the values out")
                self.count += self.sizes[id(node)]
            if self.count > self.most:
                fix = "write them out without aliases" if is_alias else "keep to settings"
                raise GraftuneError("holds too many values", where=self.where, fix=fix)
            self.sizes.setdefault(id(node), self.count - before)
            self.depth -= 1
            return node

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            lines: dict[str, int] = {}
            for key, _ in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if name in lines and name != "<<":
                    what = f"{name[:80]} is given twice, at lines {lines[name]} and {line}"
                    raise GraftuneError(what, where=self.where, fix="keep one of them")
                lines[name] = line
            return node

    return BoundedLoader


def _too_deep(where: str) -> GraftuneError:
    return GraftuneError("is nested too deeply", where=where, fix="settings are one or two levels deep")
