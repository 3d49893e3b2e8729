"""Files -> rows: numbered and parsed, their columns not yet interpreted. One small reader per format.

A bad row never stops a reader, which yields a Refusal with the reason instead. Only a fault of the whole file (not a
table, cut off, wrong encoding) is an error. Readers stream, so memory does not grow with the number of rows; only a
file that is one JSON value is read whole. A data-frame library would read these formats in fewer lines, but it guesses
types and forgets line numbers.

Row numbers: the line in JSON lines (blank lines count, but are not rows), the record's place from 1 elsewhere.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from graftune.data.columns import KNOWN, normal
from graftune.data.row import Note, Numbered, Refusal, SourceFile, plain, quoted, type_name
from graftune.data.streams import MAX_UNPACKED, TextFile, binary_of, format_of, look, text_of, too_large
from graftune.errors import GraftuneError
from graftune.io.files import check_plain

LONGEST, LONGEST_HEADER = 256 << 20, 1 << 18  # bytes or characters of one row, and of the names of columns
LARGEST_JSON = 4 << 30  # characters of a file that is one JSON value
BATCH = 128  # rows of a Parquet file: a long value that stands once in the file may be in each of them
WRAPPERS = ("data", "train", "rows", "examples", "records", "instances", "items")


def read(file: SourceFile, note: Note, max_unpacked: float = MAX_UNPACKED) -> Numbered:
    """Every row of a file, in order; `max_unpacked` is the setting's, in GiB."""
    if file.records is not None:
        yield from enumerate(map(parsed, file.records.lines), 1)
        return
    kind = format_of(file.path)
    if kind == ".parquet":
        yield from _read_parquet(file, note, max_unpacked)
        return
    opened = look(file.path, file.shown, note, max_unpacked)
    if kind in (".csv", ".tsv"):
        yield from _read_csv(opened, kind, note)
        return
    is_lines, is_list = _shape(opened)
    if is_list and kind != ".json":
        note(f"{file.shown} holds one JSON list, not one object per line, and was read as such")
    if is_lines and kind == ".json":
        note(f"{file.shown} holds one JSON object per line and was read as JSON lines")
    if is_lines or (kind != ".json" and not is_list):
        yield from _read_lines(opened)
    else:
        yield from _read_whole(opened)


def _shape(opened: TextFile) -> tuple[bool, bool]:
    """(one object per line, one list) as far as the first line tells."""
    head = opened.head.decode(opened.encoding.removesuffix("-sig"), errors="replace").lstrip("\ufeff \t\r\n")
    if head.startswith("["):
        line = head.partition("\n")[0].rstrip()
        rest = head[len(line) :].lstrip()
        # If each line is a list of its own, the lines are bad rows, not one list of rows.
        return False, not (line.endswith("]") and rest.startswith(("[", "{")))
    first, _, rest = head.partition("\n")
    return isinstance(_loaded(first), dict) and bool(rest.strip()), False


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_lines(opened: TextFile) -> Numbered:
    if not opened.encoding.startswith("utf-8"):
        with text_of(opened) as lines:
            for number, line in enumerate(_lines(lines, opened.shown), 1):
                if line.strip("\ufeff \t\r\n"):
                    yield number, parsed(line.lstrip("\ufeff"))
        return
    with binary_of(opened) as file:
        for number, raw in enumerate(_lines(file, opened.shown), 1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield number, parsed(raw)


def _lines(file: Any, shown: str) -> Iterator[Any]:
    """Yields the lines of a stream; refuses the file if one is longer than LONGEST."""
    while line := file.readline(LONGEST + 1):
        if len(line) > LONGEST:
            raise GraftuneError(
                f"a line is longer than {LONGEST >> 20} MiB", where=shown, fix="write one record per line"
            )
        yield line


def parsed(line: bytes | str) -> dict[str, Any] | Refusal:
    """Parses a row from one line of JSON."""
    try:
        return _object(json.loads(line if isinstance(line, str) else line.decode("utf-8")))
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


def _read_whole(opened: TextFile) -> Numbered:
    """A file that is one JSON value: a list of rows, or an object with the rows under a key such as "data"."""
    with text_of(opened) as text:
        content = text.read(LARGEST_JSON + 1)
    if len(content) > LARGEST_JSON:
        raise GraftuneError(
            f"is one JSON value of more than {LARGEST_JSON >> 30} GiB",
            where=opened.shown,
            fix="write it as .jsonl, one object per line",
        )
    try:
        tree = json.loads(content.strip("\ufeff"))
    except json.JSONDecodeError as error:
        raise GraftuneError(
            f"broken JSON at line {error.lineno}, column {error.colno} ({error.msg})",
            where=opened.shown,
            fix="write one list [{...}, ...], or one object per line",
        ) from None
    except (RecursionError, ValueError):
        raise GraftuneError(
            "broken JSON (nested too deeply, or a number of thousands of digits)",
            where=opened.shown,
            fix="fix the file",
        ) from None
    wrapped = [tree[key] for key in WRAPPERS if isinstance(tree.get(key), list)] if isinstance(tree, dict) else [tree]
    if len(wrapped) != 1 or not isinstance(wrapped[0], list):
        raise GraftuneError(
            f"holds {type_name(tree)}, not a list of records",
            where=opened.shown,
            fix='write [{...}, ...] or {"data": [...]} (in pandas: to_json(FILE, orient="records"))',
        )
    yield from enumerate(map(_object, wrapped[0]), 1)


def _read_csv(opened: TextFile, kind: str, note: Note) -> Numbered:
    with text_of(opened) as text:
        first = text.readline(LONGEST_HEADER + 1)
        if not first.strip() or len(first) > LONGEST_HEADER:
            raise GraftuneError("has no header", where=opened.shown, fix="name the columns in the first line")
        separator = _separator(first)
        if separator != ("\t" if kind == ".tsv" else ","):
            shown = {",": "commas", "\t": "tabs"}.get(separator, repr(separator))
            note(f"{opened.shown} separates its columns by {shown} and was read so")
        csv.field_size_limit(LONGEST)  # the module's default refuses cells over 128 KiB
        reader = csv.reader(itertools.chain([first], text), delimiter=separator, strict=True)
        number = 0
        try:
            names = [name.strip() for name in next(reader)]
            _check_names([name for name in names if name], opened.shown)
            for cells in reader:
                if cells:
                    number += 1
                    yield number, _cells(names, cells)
        except csv.Error as error:
            hint = ", or a quote that is never closed" if "end of data" in str(error) else ""
            raise GraftuneError(
                f"broken CSV at line {reader.line_num}, after row {number} ({error}{hint})",
                where=opened.shown,
                fix="fix the file",
            ) from None


def _separator(header: str) -> str:
    """The separator that gives the header the most known columns, or else the most columns; a comma if in doubt."""

    def likelihood(separator: str) -> tuple[int, int]:
        try:
            names = next(csv.reader([header], delimiter=separator))
        except csv.Error:
            return 0, 0
        return sum(normal(name) in KNOWN for name in names), len(names)

    return max((",", ";", "\t", "|"), key=likelihood)


def _check_names(names: list[str], shown: str) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise GraftuneError(f"has two columns named {quoted(twice)}", where=shown, fix="rename or remove one of them")


def _cells(names: list[str], cells: list[str]) -> dict[str, Any] | Refusal:
    if len(cells) > len(names):
        return Refusal("more cells than the header has columns")
    if len(cells) < len(names):
        return Refusal("fewer cells than the header has columns")
    return {name: cell for name, cell in zip(names, cells, strict=True) if name}


def _read_parquet(file: SourceFile, note: Note, max_unpacked: float) -> Numbered:
    """Reads BATCH rows at a time. Columns that can hold no text (times, decimals, raw bytes such as pictures) are not
    read: a value out of range in one of them would otherwise cost the row. A value that still cannot be converted
    refuses its row, not the file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise GraftuneError(
            "reading .parquet needs pyarrow", where=file.shown, fix="pip install graftune[parquet]"
        ) from None
    check_plain(file.path)
    try:
        with pyarrow.parquet.ParquetFile(file.path, buffer_size=1 << 20) as table:
            names, unused = _parquet_columns(table.schema_arrow, pyarrow.types, file.shown)
            if unused:
                note(f"columns of {file.shown} that hold no text are not used: {', '.join(map(plain, unused))}")
            number, left = 0, int(max_unpacked * 2**30)
            for batch in table.iter_batches(batch_size=BATCH, columns=names):
                left -= batch.nbytes
                if left < 0:
                    raise too_large(file.shown, max_unpacked)
                for place in range(batch.num_rows):
                    number += 1
                    yield number, _parquet_row(batch.schema.names, batch.columns, place, pyarrow.ArrowException)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise GraftuneError(
            f"is not a Parquet file that can be read ({reason})", where=file.shown, fix="write it again"
        ) from None


def _parquet_columns(schema: Any, types: Any, where: str) -> tuple[list[str], list[str]]:
    """(names of the columns to read, names of the columns that are skipped)."""
    names: list[str] = []
    left: list[str] = []
    _check_names(schema.names, where)
    for field in schema:
        raw = types.is_binary(field.type) or types.is_large_binary(field.type) or types.is_fixed_size_binary(field.type)
        other = types.is_temporal(field.type) or types.is_decimal(field.type)
        (left if other or (raw and normal(field.name) not in KNOWN) else names).append(field.name)
    return names, left


def _parquet_row(
    names: list[str], columns: list[Any], place: int, failure: type[Exception]
) -> dict[str, Any] | Refusal:
    """One row of a batch, value by value, so that a value which cannot be converted refuses its row only."""
    found = {}
    for name, column in zip(names, columns, strict=True):
        try:
            found[name] = _without_none(column[place].as_py())
        except (failure, ValueError, OverflowError, RecursionError) as error:
            return Refusal("a value that cannot be read", f"in column {name!r} ({type(error).__name__})")
    return found


def _without_none(value: Any) -> Any:
    """Drop absent fields: a column of lists of structs gives every struct every field, with None for missing ones."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value.decode("utf-8") if isinstance(value, bytes) else value
