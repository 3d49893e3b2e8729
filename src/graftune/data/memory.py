"""Records that are in memory (a list, a Hugging Face Dataset, an iterator) -> a file like any other.

They are written as JSON lines under the user's cache folder, named by their content: the same records are the same
file, so that what was encoded before is found again, and a run on them can be resumed. A second path through the
readers would have checks, counts and digests of its own.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graftune import mixture
from graftune.errors import GraftuneError
from graftune.files import write_file
from graftune.mixture import DataValue
from graftune.remembered import cache_folder

Records = Iterable[Mapping[str, Any]]
Data = str | os.PathLike[str] | Records  # what the Python verbs take: a path, a Hub name, or records


def as_value(data: Data | DataValue) -> DataValue:
    """The value of the setting `data`: paths and lists of sources as they are, records as the file they were put in."""
    if isinstance(data, str):
        return data
    if isinstance(data, os.PathLike):
        return str(Path(data))
    if isinstance(data, Mapping):
        raise GraftuneError("data is a single mapping", mend="give a list of records, or a path")
    if isinstance(data, tuple | list) and data and all(_is_source(entry) for entry in data):
        return mixture.checked("data", list(data))
    return str(stored(data))


def _is_source(entry: Any) -> bool:
    """One entry of a list of sources; a record has other keys."""
    source = isinstance(entry, Mapping) and "path" in entry and set(entry) <= set(mixture.KEYS)
    return isinstance(entry, str) or source


def stored(records: Records) -> Path:
    """The file of these records. A Hugging Face Dataset is iterated like a list."""
    lines = []
    for row, record in enumerate(records, 1):
        if not isinstance(record, Mapping):
            kind = type(record).__name__
            raise GraftuneError(f"record {row} is a {kind}", mend="each record is a dict such as {'prompt': ...}")
        try:
            lines.append(json.dumps(dict(record), ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise GraftuneError(
                f"record {row} holds what JSON cannot ({error})", mend="keep text, numbers, lists and dicts"
            ) from None
    if not lines:
        raise GraftuneError("there are no records in the data", mend="give at least one")
    content = ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
    name = f"{hashlib.sha256(content).hexdigest()[:32]}.jsonl"
    place = cache_folder() / "records" / name
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            write_file(place, content, unique=True)
    except OSError:  # no folder to keep it in: it lives as long as this process does
        handle, path = tempfile.mkstemp(suffix=f"-{name}")
        os.close(handle)
        place = Path(path)
        place.write_bytes(content)
        atexit.register(place.unlink, missing_ok=True)
    return place
