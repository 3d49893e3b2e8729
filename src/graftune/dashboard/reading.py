"""Opens files of a run folder, which may have been copied from anywhere.

A name is opened only if it is a regular file (a pipe would hang the server) and not a link, up to a size limit. Links
are the only way out of a folder for names that we choose ourselves, so every read stays inside the folder.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from graftune.errors import GraftuneError
from graftune.io.files import open_plain
from graftune.io.json_file import NotJson, parse_json
from graftune.io.yaml_file import LARGEST as LARGEST_YAML
from graftune.observe.events import plain
from graftune.observe.report import settings_of

Stamp = tuple[int, int, int]
NO_FILE: Stamp = (0, 0, 0)


def read_bytes(path: str | Path, most: int) -> bytes | None:
    """The content, or None if there is no such file or it is larger than `most`."""
    try:
        with open_plain(path, follow=False) as file:
            content = file.read(most + 1)
    except (OSError, GraftuneError):
        return None
    return content if len(content) <= most else None


def read_json(path: Path, most: int) -> Any:
    """The document in a file as JSON types that every browser reads; None if it cannot be read."""
    content = read_bytes(path, most)
    try:
        return None if content is None else plain(parse_json(content))
    except NotJson:
        return None


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings of config.yaml by name, without their sections; empty where it is missing or not YAML. They are not
    checked: another version may have written the run."""
    content = read_bytes(path, LARGEST_YAML)
    return {} if content is None else settings_of(content.decode("utf-8-sig", "replace"))


def stamp(path: str | Path) -> Stamp:
    """Inode, size and modification time, which change with the file. Zeros where there is no regular file."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return NO_FILE
    return (found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else NO_FILE


def is_file(path: str | Path) -> bool:
    return stamp(path) != NO_FILE
