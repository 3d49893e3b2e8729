"""Reads JSON files of bounded size, and reports every fault as one kind of error.

Python's reader takes the last of two equal keys, and raises RecursionError for a deeply nested file (or, from 3.12 on,
returns a value that cannot be walked through). This one refuses a key that occurs twice, since two programs would read
two different files, and nesting deeper than any file of ours. Every fault is a `NotJson`, a ValueError whose text
completes a sentence about the file.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graftune.errors import one_line
from graftune.io.files import open_plain

LARGEST = 64 << 20  # bytes: a model's own settings have kilobytes, a large vocabulary thirty megabytes
DEEPEST = 100  # lists and objects inside each other
_SHOWN = 80  # characters of a key in a message


class NotJson(ValueError):
    """What is wrong with a file: "is not valid JSON (line 3, column 7)"."""


def read_json(path: Path, largest: int = LARGEST) -> Any:
    """The value in a file. Raises NotJson, OSError if the file cannot be read, and GraftuneError for a pipe."""
    with open_plain(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise NotJson(f"is larger than {largest >> 20} MiB")
    return parse_json(content)


def parse_json(content: bytes | str) -> Any:
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        with no_collections():
            value = json.loads(text, object_pairs_hook=_object)
        if text.count("[") + text.count("{") > DEEPEST and is_deep(value):
            raise RecursionError
        return value
    except NotJson:
        raise
    except UnicodeDecodeError:
        raise NotJson("is not valid JSON (not UTF-8 text)") from None
    except json.JSONDecodeError as error:
        raise NotJson(f"is not valid JSON (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise NotJson("is not valid JSON (nested too deeply)") from None
    except ValueError:  # a whole number of more digits than Python reads
        raise NotJson("is not valid JSON (a number of thousands of digits)") from None


def is_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than DEEPEST levels deep."""
    level = [value]
    for _ in range(DEEPEST):
        inside = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [inner for values in inside for inner in values if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def read_object(path: Path, largest: int = LARGEST) -> dict[str, Any]:
    """Like `read_json`, for a file that must hold an object."""
    value = read_json(path, largest)
    if not isinstance(value, dict):
        raise NotJson("is not valid JSON (not an object with keys and values)")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise NotJson(f"holds the key {one_line(twice, _SHOWN)!r} twice in one object")
    return found


@contextmanager
def no_collections() -> Iterator[None]:
    """Pauses Python's cycle collector. Values read from a file have no cycles, and the collector takes a tenth of the
    time of reading rows, and most of the time of a line of many lists."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
