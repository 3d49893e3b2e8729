"""Opens the files of a base or an adapter, with one message for each way that this can fail."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graftune.errors import GraftuneError
from graftune.io.files import open_plain
from graftune.io.json_file import NotJson, read_object


def open_map(path: Path, access: int = mmap.ACCESS_READ) -> mmap.mmap:
    try:
        with open_plain(path) as file:
            return mmap.mmap(file.fileno(), 0, access=access)
    except FileNotFoundError:
        raise GraftuneError("no such file", where=str(path), fix="check the path") from None
    except GraftuneError:
        raise
    except (OSError, ValueError) as error:
        raise GraftuneError(f"cannot be read ({error})", where=str(path), fix="check the file") from None


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """The JSON object in a file that exists. `fix`: what to do if it holds something else."""
    try:
        return read_object(path)
    except NotJson as error:
        raise GraftuneError(str(error), where=str(path), fix=fix) from None
    except OSError as error:
        raise GraftuneError(f"cannot be read ({error.strerror})", where=str(path), fix="check the file") from None


@contextmanager
def sensible(what: str, path: Path, fix: str) -> Iterator[None]:
    """Turns errors from damaged values (text for a number, impossible numbers) into one message: `what` no sense."""
    try:
        yield
    except GraftuneError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise GraftuneError(f"{what} no sense ({error})", where=str(path), fix=fix) from None
