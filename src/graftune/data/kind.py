"""The kinds of data: answers to train on, pairs of which one is preferred, answers with a rating ...

A kind defines which examples a row becomes, which of its columns are numbers that go with them, and which files are of
another kind. A loss takes data of one kind and refuses others (losses/interface.py): cross-entropy on data of pairs
would train on rejected answers. So the kind is part of the encoded data and of the key under which it is cached.

Several answers to one prompt in a row (`members`) are a group: they stay together in one micro-batch, are repeated,
held out and counted together, and if one of them cannot be used, the row is refused.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graftune.batch import Example
from graftune.data import columns
from graftune.data.record import Record, to_record
from graftune.data.row import Refusal, quoted
from graftune.errors import GraftuneError


@dataclass(frozen=True)
class DataKind:
    name: str  # in the plural, as messages have it
    # Answers to one prompt that a row has: each becomes one example, and all have the same prompt, token for token.
    # 0: the row becomes as many examples as its text makes.
    members: int = 0
    takes: str = ""  # a phrase for such data in messages; empty: files of other kinds are not recognised
    numbers: tuple[str, ...] = ()  # columns that every row has, each one number, for the loss to read

    def records(self, row: dict[str, Any]) -> list[Record]:
        """The records of a row, one for each member if there are any; raises Refusal."""
        if self.numbers:
            row = {name: value for name, value in row.items() if name not in self.numbers}
        return [to_record(row)]

    def numbers_of(self, row: dict[str, Any]) -> dict[str, float]:
        return {name: number_of(row, name) for name in self.numbers}

    def refusal_of_all(self, row: dict[str, Any]) -> GraftuneError | None:
        """Why a whole file with such a row is refused: it is of another kind."""
        return columns.refusal_of_other(row, self.name, self.takes) if self.takes else None

    def warning(self, examples: Sequence[Example]) -> str:
        """What is suspicious about training data of this kind; empty if nothing is."""
        return ""

    @property
    def key(self) -> list[Any]:
        """Everything about the kind that decides which examples rows become; part of the cache key."""
        own = type(self)
        try:
            source = hashlib.sha256(inspect.getsource(own).encode()).hexdigest()
        except (OSError, TypeError):  # typed in at a prompt
            source = ""
        return [self.name, self.members, list(self.numbers), own.__module__, own.__qualname__, source]


class AnswerKind(DataKind):
    """Answers, all of which are trained on, and plain texts."""

    def refusal_of_all(self, row: dict[str, Any]) -> GraftuneError | None:
        return columns.refusal_of_all(row)


ANSWERS = AnswerKind("answers")


def number_of(row: dict[str, Any], name: str) -> float:
    """The number in a column, where true is 1 and false is 0; raises Refusal."""
    value = row.get(name)
    if isinstance(value, str):  # as CSV files have it
        value = {"true": 1.0, "false": 0.0}.get(value.strip().lower(), value)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = float("nan")
    if not math.isfinite(number):
        what = f"is {quoted(value)}" if name in row else "is missing"
        raise Refusal("no number", f"{name!r} must be a finite number and {what}")
    return number
