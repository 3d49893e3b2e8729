"""Files -> rows: numbered, parsed, not yet understood.

One small reader per file type, all yielding the same `Row`: its number, and either the object found there or the
reason why there is none. A bad row never stops a reader; whether it stops the run is for the caller to say
(`strict`). Only what spoils the whole file (missing, empty, not UTF-8, not a table) is an error here. A data-frame
library would read these formats in fewer lines, but it guesses types and forgets line numbers.

Row numbers: the line in .jsonl and .ndjson (blank lines count, but are not rows), the record's place from 1 elsewhere.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftune.errors import GraftuneError


class Refusal(Exception):
    """Why one row is not used. `reason` is what the summary counts; `detail` adds what is particular to the row."""

    def __init__(self, reason: str, detail: str = ""):
        self.reason = reason
        self.text = f"{reason}: {detail}" if detail else reason
        super().__init__(self.text)


@dataclass(frozen=True)
class Row:
    number: int
    value: dict[str, Any] | Refusal


def read_rows(path: str | Path) -> Iterator[Row]:
    """Every row of a .jsonl, .ndjson, .json, .csv or .parquet file, in order."""
    path = check_file(path)
    return _READERS[path.suffix.lower()](path)


def check_file(path: str | Path) -> Path:
    """The path, once it is sure to be a file that can be read and whose type is known."""
    path = Path(path)
    where = str(path)
    if path.is_dir():
        raise GraftuneError("is a folder", where=where, mend="name the data file inside it")
    if not path.exists():
        raise GraftuneError("no such file", where=where, mend="check the path of the data")
    if path.suffix.lower() not in _READERS:
        known = ", ".join(_READERS)
        shown = path.suffix or "no extension"
        raise GraftuneError(f"unknown kind of data file ({shown})", where=where, mend=f"use one of {known}")
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise GraftuneError(
            f"cannot be read ({error.strerror})", where=where, mend="check the file's permissions"
        ) from None
    if not head:
        raise GraftuneError("is empty", where=where, mend="give a file with at least one record")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise GraftuneError("is UTF-16 text", where=where, mend="save it as UTF-8")
    return path


def sha256_of(path: str | Path) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield Row(number, _parsed(line))


def _parsed(line: bytes) -> dict[str, Any] | Refusal:
    try:
        return _object(json.loads(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return Refusal("not UTF-8", f"byte {error.start + 1} of the line")
    except json.JSONDecodeError as error:
        return Refusal("broken JSON", f"{error.msg} at column {error.colno}")
    except RecursionError:
        return Refusal("broken JSON", "nested too deeply")
    except ValueError as error:  # an integer of thousands of digits
        return Refusal("broken JSON", str(error).split(";")[0])


def _object(value: object) -> dict[str, Any] | Refusal:
    if isinstance(value, dict):
        return value
    return Refusal("not an object", f"the row is {type_name(value)}, not an object with keys")


def _read_json(path: Path) -> Iterator[Row]:
    where = str(path)
    text = _decoded(path)
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise GraftuneError(
                f"holds more than one JSON value (line {error.lineno})",
                where=where,
                mend="if it has one object a line, name it .jsonl",
            ) from None
        raise GraftuneError(
            f"broken JSON at line {error.lineno}, column {error.colno} ({error.msg})", where=where, mend="mend the file"
        ) from None
    except (RecursionError, ValueError):
        raise GraftuneError("JSON that cannot be parsed", where=where, mend="mend the file") from None
    if isinstance(tree, dict) and isinstance(tree.get("data"), list):
        tree = tree["data"]
    if not isinstance(tree, list):
        raise GraftuneError(
            f"holds {type_name(tree)}, not a list of records", where=where, mend='write [{...}, ...] or {"data": [...]}'
        )
    for number, value in enumerate(tree, 1):
        yield Row(number, _object(value))


def _read_csv(path: Path) -> Iterator[Row]:
    text = _decoded(path)
    limit = csv.field_size_limit(len(text) + 1)  # the module's default refuses cells over 128 KiB
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        rows = [_cells(number, cells) for number, cells in enumerate(reader, 1)]
    except csv.Error as error:
        raise GraftuneError(
            f"broken CSV at line {reader.line_num} ({error})", where=str(path), mend="mend the file"
        ) from None
    finally:
        csv.field_size_limit(limit)
    yield from rows


def _cells(number: int, cells: dict[Any, Any]) -> Row:
    if None in cells:
        return Row(number, Refusal("more cells than the header has columns"))
    missing = [name for name, cell in cells.items() if cell is None]
    if missing:
        return Row(number, Refusal("fewer cells than the header has columns"))
    for name in ("messages", "conversations", "tools"):  # nested values are JSON inside a cell
        if cells.get(name):
            try:
                cells[name] = json.loads(cells[name])
            except ValueError:
                return Row(number, Refusal("broken JSON", f"in column {name!r}"))
    return Row(number, cells)


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise GraftuneError(
            "reading .parquet needs pyarrow", where=str(path), mend="pip install graftune[parquet]"
        ) from None
    try:
        table = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in table.iter_batches():
            for record in batch.to_pylist():
                number += 1
                # A column of lists of structs gives every struct every field: the absent ones are None.
                yield Row(number, _without_none(record))
    except (pyarrow.ArrowException, OSError) as error:
        raise GraftuneError(
            f"is not a Parquet file that can be read ({str(error).splitlines()[0]})",
            where=str(path),
            mend="write it again",
        ) from None


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value


def _decoded(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise GraftuneError(f"is not UTF-8 (byte {error.start})", where=str(path), mend="save it as UTF-8") from None


def type_name(value: object) -> str:
    """A JSON value's type in the user's words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


_READERS = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
