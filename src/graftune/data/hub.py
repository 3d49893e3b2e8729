"""Data sets from the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from graftune.errors import GraftuneError
from graftune.mixture import Source


def files_of(source: Source, note: Callable[[str], None]) -> list[tuple[Path, str]]:
    raise GraftuneError("no such file", where=source.path, mend="check the path of the data")
