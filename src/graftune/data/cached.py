"""The cache of encoded data: one file per data set and way of encoding it, under the user's cache folder.

The key is everything that decides a token or a mask: the data's content and its kind, the tokenizer, the template, the
settings of the data section, and the code that does it (its own source, so that no version number can be forgotten).
Files are written aside and renamed, so two processes that encode the same data at once both end with a whole file.
An entry only saves time: a damaged one is made again, the least recently used go when all of them exceed
`LIMIT`, and where the folder cannot be written the data lives in a temporary file for as long as the process does.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from graftune.data.encoded import DamagedStore, TokenStore
from graftune.data.kind import ANSWERS, DataKind
from graftune.data.writer import StoreWriter
from graftune.errors import GraftuneError
from graftune.io import files, user_cache
from graftune.settings.sections import DataConfig
from graftune.tokenizer import Tokenizer

LIMIT = 20 << 30  # bytes of all entries together
SUFFIX = ".tokens"
# Settings that do not change how the data is encoded; a date is part of the tokenizer's fingerprint.
_APART = ("data", "eval_data", "val_split", "eval_examples", "date", "max_unpacked")


def folder() -> Path:
    return user_cache.cache_folder() / "data"


def key_of(sources: Sequence[Any], tokenizer: Tokenizer, config: DataConfig, kind: DataKind = ANSWERS) -> str:
    """The key of encoded data. `sources`: each source's content and what is done with it, as JSON values. `kind`: how
    rows are read."""
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _APART}
    if config.template not in ("auto", "none"):
        with (
            suppress(OSError, GraftuneError),
            files.open_plain(config.template) as file,
        ):  # reported by its reader
            settings["template"] = hashlib.file_digest(file, "sha256").hexdigest()
    made = [list(sources), tokenizer.fingerprint, settings, kind.key, _code()]
    return hashlib.sha256(json.dumps(made, sort_keys=True, default=repr).encode()).hexdigest()[:40]


@functools.cache
def _code() -> str:
    digest = hashlib.sha256(f"{tokenizers.__version__} {jinja2.__version__}".encode())
    folders = Path(__file__).parent, Path(__file__).parents[1] / "tokenizer"
    for file in sorted(file for folder in folders for file in folder.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def find(key: str) -> TokenStore | None:
    """The entry, if there is a whole one. A damaged entry is made again in its place."""
    path = folder() / f"{key}{SUFFIX}"
    try:
        store = TokenStore.open(path)
    except (OSError, DamagedStore):
        return None
    if store.header["key"] != key:
        return None
    with suppress(OSError):  # another user's folder can be read, but the file not marked as used
        os.utime(path)
    return store


def make(key: str, vocabulary: int, write: Callable[[StoreWriter], dict[str, Any]]) -> tuple[TokenStore, str]:
    """Makes an entry; also returns why the next start will not find it, or an empty string. `write` fills the entry and
    returns facts for the header."""
    path = folder() / f"{key}{SUFFIX}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except (OSError, RuntimeError) as error:  # the last: there is no home folder
        return _temporary(key, vocabulary, write), getattr(error, "strerror", "") or str(error)
    try:
        writer = StoreWriter(vocabulary, path.parent)
        facts = write(writer)
        with files.new_file(path, unique=True) as aside, aside.open("wb") as file:
            writer.close(file, key=key, **facts)
        store = TokenStore.open(path)
    except OSError as error:
        raise GraftuneError(
            f"the encoded data cannot be written ({error.strerror})",
            where=str(path.parent),
            fix="free some space there, or name another folder with GRAFTUNE_CACHE",
        ) from error
    files.prune_folder(path, LIMIT)
    return store, ""


def _temporary(key: str, vocabulary: int, write: Callable[[StoreWriter], dict[str, Any]]) -> TokenStore:
    """Encoded data in a file that lives as long as this process does."""
    with tempfile.TemporaryFile() as file:
        writer = StoreWriter(vocabulary, Path(tempfile.gettempdir()))
        writer.close(file, key=key, **write(writer))
        return TokenStore(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
