"""The one way to write a file or a folder, and to claim a folder.

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
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from graftune.errors import GraftuneError

PART, OLD = ".part", ".old"  # what follows a name: still being written; stepping away
LOCK = ".lock"
_ABANDONED = 86400.0  # seconds without a write after which a half-written file is nobody's
_AT_FDCWD, _RENAME_EXCHANGE, _RENAME_SWAP = -100, 2, 2
# The file system or the kernel has no exchange, or no locks.
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


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


def remove(path: Path) -> None:
    """A file, link or folder, whether there is one or not."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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


class FolderLock:
    """One process at a time writes to a folder. The lock belongs to an open file, so it dies with its process, however
    that ends; the file stays and says whose it was last. Never waits.

    `unsupported` is why there is no lock, on file systems that have none: whoever asked should say so."""

    def __init__(self, folder: str | Path):
        self.path, self.unsupported = Path(folder) / LOCK, ""
        self._handle = -1

    def acquire(self) -> FolderLock:
        while self._handle < 0:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._lock(handle)
                same = self._is(handle)  # not if its last owner has just taken it away with the folder
            except BaseException:
                os.close(handle)
                raise
            if same:
                self._handle = handle
            else:
                os.close(handle)
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)
        return self

    def _lock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
            who = f"process {owner}" if owner.isdecimal() else "another process"
            raise GraftuneError(
                f"{who} is training in this folder",
                where=str(self.path.parent),
                mend="wait until it is done, or stop it",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.unsupported = os.strerror(error.errno)

    def _is(self, handle: int) -> bool:
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        mine = os.fstat(handle)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> FolderLock:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
