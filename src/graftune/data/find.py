"""The value of `data` -> the files to read: a file, a folder, a glob, or a data set on the Hub."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from graftune.data import hub
from graftune.data.row import Note, SourceFile
from graftune.data.splits import is_data, listed, of_split, of_subset
from graftune.data.streams import FORMATS, format_of
from graftune.errors import GraftuneError
from graftune.io.files import open_plain
from graftune.settings.sources import GLOB, Source

_KNOWN = ", ".join(FORMATS) + " (text formats also as .gz, .zst, .bz2 or .xz)"


def files_of(source: Source, note: Note) -> list[SourceFile]:
    path = Path(source.path).expanduser()
    if path.is_dir():
        found = _in_folder(path, source, note)
    elif path.exists() or path.is_symlink():
        check_file(path)
        found = [path]
    elif GLOB & set(source.path) and "://" not in source.path:
        found = _matching(str(path), source.path)
    else:
        return [_described(file, source, shown) for file, shown in hub.files_of(source, note)]
    if (source.subset or source.split) and not path.is_dir():
        raise GraftuneError(
            "is a file, and split and subset choose among the files of a folder or Hub data set",
            where=source.path, fix="leave them out",
        )  # fmt: skip
    return [_described(file, source, str(file)) for file in found]


def _described(path: Path, source: Source, shown: str) -> SourceFile:
    return SourceFile(path, shown, source.weight, None if source.map is None else tuple(source.map.items()))


def check_file(path: str | Path) -> Path:
    """Checks that the path is a file that can be read and whose type is known; returns it."""
    path, where = Path(path), str(path)
    if not path.exists():
        raise GraftuneError("no such file", where=where, fix="check the path of the data")
    if format_of(path) is None:
        shown = path.suffix or "no extension"
        raise GraftuneError(f"unknown kind of data file ({shown})", where=where, fix=f"use one of {_KNOWN}")
    try:
        with open_plain(path) as file:
            head = file.read(1)
    except OSError as error:
        raise GraftuneError(
            f"cannot be read ({error.strerror})", where=where, fix="check the file's permissions"
        ) from None
    if not head:
        raise GraftuneError("is empty", where=where, fix="give a file with at least one record")
    return path


def _matching(pattern: str, shown: str) -> list[Path]:
    found = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    data = [path for path in found if is_data(path.name) and not path.is_dir()]
    if not data:
        what = f"matches {len(found)} files but no data file" if found else "matches no file"
        raise GraftuneError(what, where=shown, fix=f"data files are {_KNOWN}")
    return [check_file(path) for path in data]


def _in_folder(folder: Path, source: Source, note: Note) -> list[Path]:
    where = str(folder)
    names = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = Path(root).relative_to(folder)
        names += [str(inside / name) for name in files if not name.startswith(".")]
    data = sorted(name for name in names if is_data(name))
    if not data:
        if any(name.endswith(".arrow") for name in names):
            raise GraftuneError(
                "is a folder of Arrow files, as save_to_disk writes them",
                where=where, fix="write Parquet files with Dataset.to_parquet and give those",
            )  # fmt: skip
        raise GraftuneError("is a folder without data files", where=where, fix=f"data files are {_KNOWN}")
    if source.subset:
        data = of_subset(data, source.subset, where)
    chosen = of_split(data, source.split, where)
    others = [name for name in data if name not in chosen]
    if others:
        note(f"{where}: took {listed(chosen)}; left for other splits: {listed(others)}")
    return [check_file(folder / name) for name in chosen]
