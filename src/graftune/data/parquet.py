"""Parquet files, some rows at a time.

Columns that can hold no text (times, decimals, raw bytes such as pictures) are not read: a value out of range
in one of them would otherwise cost the row. What still cannot be converted refuses its row, not the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from graftune.data.columns import KNOWN, normal
from graftune.data.row import Refusal, SourceFile, plain, quoted
from graftune.data.streams import too_large
from graftune.errors import GraftuneError
from graftune.io.files import check_plain

BATCH = 128  # rows: a long value that stands once in the file may be in each of them


def read_parquet(
    file: SourceFile, note: Callable[[str], None], max_unpacked: float
) -> Iterator[tuple[int, dict[str, Any] | Refusal]]:
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
            names, unused = _columns(table.schema_arrow, pyarrow.types, file.shown)
            if unused:
                note(f"columns of {file.shown} that hold no text are not used: {', '.join(map(plain, unused))}")
            number, left = 0, int(max_unpacked * 2**30)
            for batch in table.iter_batches(batch_size=BATCH, columns=names):
                left -= batch.nbytes
                if left < 0:
                    raise too_large(file.shown, max_unpacked)
                for place in range(batch.num_rows):
                    number += 1
                    yield number, _record(batch.schema.names, batch.columns, place, pyarrow.ArrowException)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise GraftuneError(
            f"is not a Parquet file that can be read ({reason})", where=file.shown, fix="write it again"
        ) from None


def _columns(schema: Any, types: Any, where: str) -> tuple[list[str], list[str]]:
    """Names of the columns to read, and of those left alone."""
    names: list[str] = []
    left: list[str] = []
    for field in schema:
        if field.name in names or field.name in left:
            raise GraftuneError(
                f"has two columns named {quoted(field.name)}", where=where, fix="rename or remove one of them"
            )
        raw = types.is_binary(field.type) or types.is_large_binary(field.type) or types.is_fixed_size_binary(field.type)
        other = types.is_temporal(field.type) or types.is_decimal(field.type)
        (left if other or (raw and normal(field.name) not in KNOWN) else names).append(field.name)
    return names, left


def _record(names: list[str], columns: list[Any], place: int, failure: type[Exception]) -> dict[str, Any] | Refusal:
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
