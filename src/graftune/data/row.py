"""The types that readers pass on: a row and its place, or the reason why it cannot be used.

They have a file of their own so that recognition (columns, turns) and reading do not import each other.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from graftune.io import digest

LONGEST_QUOTE = 60


class Refusal(Exception):
    """Why one row is not used. `reason` is what the summary counts; `detail` adds what is particular to the row."""

    def __init__(self, reason: str, detail: str = ""):
        self.reason = reason
        self.text = f"{reason}: {detail}" if detail else reason
        super().__init__(self.text)


Note = Callable[[str], None]  # takes a sentence for the user about what was not read as it stands
Numbered = Iterator[tuple[int, dict[str, Any] | Refusal]]  # the rows of a file


class Row(NamedTuple):
    """`number` counts in its own file, `key` over all files of the data (with one file they are equal)."""

    number: int
    value: dict[str, Any] | Refusal
    file: str = ""  # as messages name it; empty where there is only one
    key: int = 0
    times: int = 1  # how often it occurs per epoch, by the weight of its source

    @property
    def place(self) -> str:
        """The row's file and number, for messages."""
        return f"{self.file}, row {self.number}" if self.file else f"row {self.number}"


@dataclass(frozen=True)
class Lines:
    """Records in memory as JSON lines."""

    lines: list[str]

    @functools.cached_property
    def content(self) -> bytes:
        return ("\n".join(self.lines) + "\n").encode("utf-8", "surrogatepass")

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True)
class SourceFile:
    """One file to read, or records in memory. All fields but `shown` decide what the rows are."""

    path: Path
    shown: str  # its name in messages
    weight: float = 1.0
    map: tuple[tuple[str, str], ...] | None = None  # its source's own renaming of columns; None: the settings'
    records: Lines | None = None  # read in place of a file

    @property
    def sha256(self) -> str:
        return self.records.sha256 if self.records is not None else digest.sha256([self.path])

    @property
    def ending(self) -> str:
        """The ending of its name, which decides how it is read, with the ending of a compression."""
        return "".join(self.path.suffixes[-2:]).lower()


def quoted(value: object) -> str:
    """Something from a file inside a message: escaped, in quotes, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST_QUOTE else text[: LONGEST_QUOTE - 4] + "..." + text[0]


def plain(name: object) -> str:
    """A column's name as it is, or in quotes where it could be mistaken for something else."""
    text = str(name)
    return text if text.isprintable() and 0 < len(text) <= LONGEST_QUOTE else quoted(text)


def type_name(value: object) -> str:
    """A JSON value's type in the user's words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
