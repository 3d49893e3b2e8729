"""The one way to write a file or a folder.

Whatever is written goes into a neighbour first, is flushed to the disk, renamed over its place, and the rename is
flushed too: at whatever moment the process or the machine dies, a reader finds the old content or the new, never half
of it and never nothing. A file is renamed over the old one. A folder cannot be renamed over a full one, so the two
exchange names in one system call where there is one (Linux's renameat2, macOS' renamex_np); elsewhere the old one
steps aside for a moment under a name that `whole` finds. Rejected: writing in place with a journal, which every reader
would have to understand; lock files with a process number in them, which a kill leaves behind.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PART, OLD = ".part", ".old"  # what follows a name: still being written; stepping away
_ABANDONED = 86400.0  # seconds without a write after which a half-written file is nobody's
_AT_FDCWD, _RENAME_EXCHANGE, _RENAME_SWAP = -100, 2, 2
# The file system or the kernel has no exchange.
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)


def flush(path: Path) -> None:
    """Down to the disk, file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_folder(folder: Path) -> None:
    """A folder with every file below it."""
    for path in folder.iterdir():
        if path.is_dir():
            flush_folder(path)
        else:
            flush(path)
    flush(folder)


def write_file(path: str | Path, content: bytes | str, *, unique: bool = False) -> None:
    """Replace the file at `path`. Text is written as UTF-8, its line ends as they are. `unique`: several processes may
    write it at once."""
    with new_file(path, unique=unique) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def new_file(path: str | Path, *, unique: bool = False) -> Iterator[Path]:
    """A neighbour to write to; it takes the place of `path` at the end, and is gone if the body fails."""
    path = Path(path)
    aside = path.with_name(f"{path.name}.{os.getpid()}{PART}" if unique else path.name + PART)
    try:
        yield aside
        flush(aside)
        os.replace(aside, path)
    except BaseException:  # a full disk or Ctrl-C must not keep the half that fitted
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    flush(path.parent)


@contextmanager
def new_folder(final: str | Path) -> Iterator[Path]:
    """An empty neighbour to fill; it takes the place of `final` at the end, and is gone if the body fails."""
    final = Path(final)
    aside = final.with_name(final.name + PART)
    remove(aside)
    aside.mkdir(parents=True)
    try:
        yield aside
        replace_folder(aside, final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def replace_folder(aside: Path, final: Path) -> None:
    """Flush `aside` and put it in the place of `final`, which need not exist and is deleted if it does."""
    flush_folder(aside)
    old = final.with_name(final.name + OLD)
    if not final.exists():  # `old` may be all that a kill left of it: it goes only after the new one is there
        os.rename(aside, final)
    elif _exchange(aside, final):
        old = aside
    else:
        remove(old)
        os.rename(final, old)
        try:
            os.rename(aside, final)
        except BaseException:
            os.rename(old, final)
            raise
    flush(final.parent)
    remove(old)


def whole(final: Path) -> Path:
    """`final`, or what a kill between the two renames of a system without an exchange has left of it."""
    old = final.with_name(final.name + OLD)
    return old if not final.exists() and old.exists() else final


def settle_folder(final: Path) -> None:
    """After a kill, by the only one who writes there: what is unfinished goes, and a folder that was left under its old
    name gets its own back."""
    old = final.with_name(final.name + OLD)
    if final.exists():
        remove(old)
    elif old.is_dir():
        os.rename(old, final)
    remove(final.with_name(final.name + PART))


def remove(path: Path) -> None:
    """A file, link or folder, whether there is one or not."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_at_once(folder: Path) -> None:
    """Delete a folder that is whole until it is gone: what a kill leaves of it has the name of something unfinished."""
    aside = folder.with_name(folder.name + PART)
    remove(aside)
    os.rename(folder, aside)
    shutil.rmtree(aside)


def prune_folder(keep: Path, limit: int) -> None:
    """Keep the files beside `keep` with its ending within `limit` bytes together: those used longest ago go. So does
    what was left half-written a day ago. Whoever has such a file open keeps what it mapped."""
    found = []
    with suppress(OSError):
        for path in keep.parent.iterdir():
            with suppress(OSError):
                stat = path.stat()
                if path.suffix == keep.suffix and path != keep:
                    found.append((stat.st_mtime, stat.st_size, path))
                elif path.name.endswith(PART) and time.time() - stat.st_mtime > _ABANDONED:
                    path.unlink()
        total = keep.stat().st_size
        for _, size, path in sorted(found, reverse=True):
            total += size
            if total > limit:
                with suppress(OSError):
                    path.unlink()


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names at once; False where the system cannot."""
    swap = _swapper()
    if swap is None:
        return False
    if swap(os.fsencode(one), os.fsencode(other)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(other))


def _swapper() -> Callable[[bytes, bytes], int] | None:
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "darwin":
        renamex = getattr(library, "renamex_np", None)
        return None if renamex is None else lambda one, other: int(renamex(one, other, ctypes.c_uint(_RENAME_SWAP)))
    renameat2 = getattr(library, "renameat2", None)
    if renameat2 is None:
        return None
    here, flags = ctypes.c_int(_AT_FDCWD), ctypes.c_uint(_RENAME_EXCHANGE)
    return lambda one, other: int(renameat2(here, one, here, other, flags))
