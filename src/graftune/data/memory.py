"""Records that are in memory (a list, a Hugging Face Dataset, an iterator) -> JSON lines, as a file would hold them.

Data encoded for a session stays in memory, or in the cache of encoded data. A resumed run must find its data again, so
its records are written to a file under the user's cache folder, named by their content. Either way the
lines go through the same checks, counts and digests as those of a file.
"""

from __future__ import annotations

import atexit
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graftune.data.row import Lines
from graftune.errors import GraftuneError
from graftune.io.files import prune_folder, write_file
from graftune.io.user_cache import cache_folder
from graftune.settings import sources
from graftune.settings.sources import DataValue

Records = Iterable[Mapping[str, Any]]
Data = str | os.PathLike[str] | Records  # what the Python verbs take: a path, a Hub name, or records
LIMIT = 4 << 30  # bytes of all records that are kept; those used longest ago go first


def as_given(data: Data | DataValue, verb: str = "") -> DataValue | Lines:
    """Paths and lists of sources as the setting `data` has them; records as lines. `verb`: the caller, for messages."""
    if isinstance(data, str):
        return data
    if isinstance(data, os.PathLike):
        return str(Path(data))
    if isinstance(data, Mapping):
        raise GraftuneError("data is a single mapping", where=verb or None, fix="give a list of records, or a path")
    if not isinstance(data, Iterable):
        kind = "None" if data is None else f"a value of type {type(data).__name__}"
        raise GraftuneError(f"data is {kind}", where=verb or None, fix="give a path, a Hub name or a list of records")
    if isinstance(data, tuple | list) and data and all(_is_source(entry) for entry in data):
        return sources.checked("data", list(data))
    return lines_of(data)


def as_value(data: Data | DataValue) -> DataValue:
    """The value of the setting `data`: records are put into a file."""
    given = as_given(data)
    return str(stored(given)) if isinstance(given, Lines) else given


def _is_source(entry: Any) -> bool:
    """One entry of a list of sources; a record has other keys."""
    source = isinstance(entry, Mapping) and "path" in entry and set(entry) <= set(sources.KEYS)
    return isinstance(entry, str) or source


def lines_of(records: Iterable[Any]) -> Lines:
    """The records as JSON lines. A Hugging Face Dataset is iterated like a list."""
    lines = []
    for row, record in enumerate(records, 1):
        if not isinstance(record, Mapping):
            kind = type(record).__name__
            raise GraftuneError(f"record {row} is a {kind}", fix="each record is a dict such as {'prompt': ...}")
        try:
            lines.append(json.dumps(dict(record), ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise GraftuneError(
                f"record {row} holds what JSON cannot ({error})", fix="keep text, numbers, lists and dicts"
            ) from None
    if not lines:
        raise GraftuneError("there are no records in the data", fix="give at least one")
    return Lines(lines)


def stored(records: Lines) -> Path:
    """Write these records to a file named by their content; returns its path."""
    name = f"{records.sha256[:32]}.jsonl"
    place = cache_folder() / "records" / name
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            write_file(place, records.content, unique=True)
        os.utime(place)
        prune_folder(place, LIMIT)
    except OSError:  # no folder to keep it in: it lives as long as this process does
        handle, path = tempfile.mkstemp(suffix=f"-{name}")
        os.close(handle)
        place = Path(path)
        place.write_bytes(records.content)
        atexit.register(place.unlink, missing_ok=True)
    return place
