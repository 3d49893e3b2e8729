"""Data -> rows: which files, in which order, how often, with columns renamed as asked.

`sources` finds the files (downloading those of a Hub data set), `rows` reads them. Two steps, so that a cache can be
looked up by the files before any of them is read. A row's place is its file and number; its key is unique over all
files, and equal to its number where there is one file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graftune.data.columns import ANSWERS, ASKS, CHATS, KNOWN, SYSTEMS, TARGETS, WEIGHT, normal
from graftune.data.find import files_of
from graftune.data.readers import read
from graftune.data.row import Lines, Note, Numbered, Refusal, Row, SourceFile, quoted
from graftune.data.streams import MAX_UNPACKED
from graftune.errors import GraftuneError
from graftune.settings.sources import DataValue, entries

LOOKED_AT = 100  # rows of a file that are checked before the first is yielded
STRATUM = 10  # a fraction of the rows is taken from every ten of them
_TOGETHER = (frozenset((*ASKS, *ANSWERS, "input", "context", "history")), frozenset(CHATS), frozenset({"text"}))
_BESIDE = frozenset((*SYSTEMS, WEIGHT, "tools"))


def sources(data: DataValue | Lines, note: Note = lambda text: None) -> list[SourceFile]:
    """The files that `data` names, in order; GraftuneError where there are none."""
    if isinstance(data, Lines):
        return [SourceFile(Path("records.jsonl"), "the records", records=data)]
    return [file for source in entries(data) for file in files_of(source, note)]


def rows(
    files: Sequence[SourceFile],
    map: Mapping[str, str] | None = None,
    note: Note = lambda text: None,
    refused: Callable[[dict[str, Any]], GraftuneError | None] = lambda row: None,
    max_unpacked: float = MAX_UNPACKED,
) -> Iterator[Row]:
    """Every row of the files, in order. `note` gets a sentence about what was not read as it stands; `refused` returns
    the error for a row that shows that its whole file is of another kind."""
    before = 0
    for file in files:
        shown = file.shown if len(files) > 1 else ""
        renaming = dict(file.map) if file.map is not None else dict(map or {})
        counts = _counts(file.weight)
        number = 0
        for number, value in _renamed(read(file, note, max_unpacked), renaming, file.shown, refused):
            times = next(counts)
            if times:
                yield Row(number, value, shown, before + number, times)
        before += number


def digest_of(files: Sequence[SourceFile]) -> str:
    """The digest of the data: the file's own hash if it is one file with weight 1 and no map of its own, otherwise a
    hash over those of all files, with their weights and maps."""
    hashes = [file.sha256 for file in files]
    if len(files) == 1 and files[0].weight == 1 and files[0].map is None:
        return hashes[0]
    parts = [[sha, file.weight, file.map] for sha, file in zip(hashes, files, strict=True)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _counts(weight: float) -> Iterator[int]:
    """How often each row occurs: the whole part of the weight, and once more for a share of the rows.

    The share is exact in every stretch of ten rows (up to rounding that is carried on) and random within it, by a
    fixed seed: the same rows at every start and for every seed of the run.
    """
    whole, share = int(weight), weight - int(weight)
    if not share:
        yield from itertools.repeat(whole)
    for stratum in itertools.count():
        order = np.random.default_rng([0x301D, stratum]).permutation(STRATUM)
        quota = int((stratum + 1) * STRATUM * share + 0.5) - int(stratum * STRATUM * share + 0.5)
        yield from (whole + int(place < quota) for place in order)


def _renamed(
    numbered: Numbered,
    renaming: dict[str, str],
    shown: str,
    refused: Callable[[dict[str, Any]], GraftuneError | None],
) -> Numbered:
    """Rows with the columns of `map` under the names that it gives them. The first rows are checked before any is
    yielded: a file that lacks a column of the map, or is made for other losses, is refused."""
    first = list(itertools.islice(numbered, LOOKED_AT))
    if renaming:
        renaming = _checked_map(renaming, first, shown)
        hidden = _hidden(set(renaming))
        first = [(number, _rename(value, renaming, hidden)) for number, value in first]
        numbered = ((number, _rename(value, renaming, hidden)) for number, value in numbered)
    for _, value in first:
        error = None if isinstance(value, Refusal) else refused(value)
        if error is not None:
            raise GraftuneError(error.what, where=shown, fix=error.fix)
    yield from first
    yield from numbered


def _checked_map(renaming: dict[str, str], first: Sequence[tuple[int, Any]], shown: str) -> dict[str, str]:
    """The map with normal names as its keys; refuses unknown names, and columns that none of the `first` rows has."""
    unknown = [target for target in renaming if normal(target) not in TARGETS]
    if unknown:
        raise GraftuneError(f"map: there is no field {unknown[0]!r}", fix=f"a map names {', '.join(TARGETS)}")
    found = list(dict.fromkeys(name for _, value in first if isinstance(value, dict) for name in value))
    missing = [column for column in renaming.values() if column not in found]
    if missing and found:
        listed = ", ".join(quoted(name) for name in found[:20]) + (", ..." if len(found) > 20 else "")
        raise GraftuneError(f"map: there is no column {quoted(missing[0])}", where=shown, fix=f"it has {listed}")
    return {normal(target): column for target, column in renaming.items()}


def _hidden(targets: set[str]) -> Callable[[str], bool]:
    """Returns a test for columns that a map hides: those of other kinds of records and, if the map names the answer,
    all unknown columns too, so that a map such as response=chosen trains on the preferred answers."""
    mine = [group for group in _TOGETHER if group & targets]
    others = KNOWN - frozenset().union(*mine, _BESIDE) if mine else frozenset()
    explicit = bool(targets & {*ANSWERS, *CHATS, "text"})
    return lambda name: name in targets or name in others or (explicit and name not in KNOWN)


def _rename(value: dict[str, Any] | Refusal, renaming: dict[str, str], hidden: Callable[[str], bool]) -> Any:
    if isinstance(value, Refusal):
        return value
    missing = next((column for column in renaming.values() if column not in value), None)
    if missing is not None:
        return Refusal("missing column", f"{quoted(missing)}, which map names")
    taken = set(renaming.values())
    kept = {name: inner for name, inner in value.items() if name not in taken and not hidden(normal(name))}
    return {target: value[column] for target, column in renaming.items()} | kept
