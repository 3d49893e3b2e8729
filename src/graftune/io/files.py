"""Writes files and folders atomically, and opens files from untrusted sources.

New content is written to a neighbouring path, flushed to the disk and renamed into place, and the rename is flushed
too. If the process or the machine dies, a reader finds the old content or the new content, never a part. A folder
cannot be renamed over a non-empty one, so the two exchange names in one system call (Linux's renameat2); on other
systems the old folder is renamed to a name that `whole` finds. Rejected: writing in place with a
journal, which every reader would have to understand; lock files with a process number, which a kill leaves behind.

A path may lead to a pipe, which blocks its reader for ever, to an endless device, or through a link to a private file.
So `open_plain` opens files to read, `open_own` opens files that a run writes to, and `check_inside` is called before a
file's text is copied to an export.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from graftune.errors import GraftuneError

PART, OLD = ".part", ".old"  # endings of a path that is still being written, and of a folder that is being replaced
_ABANDONED = 86400.0  # seconds without a write after which a half-written file counts as abandoned
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# The file system or the kernel has no exchange.
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)


_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def special(path: str | Path) -> str:
    """The kind of a special file, such as "a pipe" or "a device"; empty for files, folders and missing paths."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return ""
    return _KINDS.get(stat.S_IFMT(mode), "")


def open_plain(path: str | Path, follow: bool = True) -> io.BufferedReader:
    """Open a file to read. GraftuneError for a pipe or a device; OSError as from `open`, and for a link that is not to
    be followed."""
    return os.fdopen(_opened(path, os.O_RDONLY if follow else os.O_RDONLY | os.O_NOFOLLOW), "rb")


def check_plain(path: str | Path) -> None:
    """Check a file like `open_plain`, for a library that opens it by its name."""
    os.close(_opened(path, os.O_RDONLY))


def open_own(path: str | Path, flags: int = 0) -> int:
    """Open a run's own file to read and write, creating it if needed, and return its handle. A link is refused, because
    the run would write to another place. An existing file is opened without O_CREAT, which Linux refuses for files of
    other users in a folder like /tmp (fs.protected_regular)."""
    flags |= os.O_RDWR | os.O_NOFOLLOW
    while True:
        try:
            return _opened(path, flags)
        except FileNotFoundError:
            with suppress(FileExistsError):
                return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _opened(path: str | Path, flags: int) -> int:
    follow = not flags & os.O_NOFOLLOW
    _check_mode(path, os.stat(path, follow_symlinks=follow).st_mode)  # opening a device may start it
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_mode(path, os.fstat(handle).st_mode)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _check_mode(path: str | Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if stat.S_ISLNK(mode):
        raise _is_link(path)
    if not stat.S_ISREG(mode):
        what = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise GraftuneError(f"is {what}, not a file", where=str(path), fix="put a plain file in its place")


_SNAPSHOT = re.compile(r"(.*/(?:models|datasets|spaces)--[^/]+)/snapshots/[^/]+")


def check_inside(path: Path) -> None:
    """Refuse a link to a file of another name outside of the file's own folder: exports copy its text, which might be a
    private file. A snapshot in the Hub's cache consists of links to the blobs beside it, and users make folders of
    links to the files of a model; both are accepted."""
    if not path.is_symlink():
        return
    folder, target = path.parent.resolve(), path.resolve()
    snapshots = [_SNAPSHOT.match(f"{place}/") for place in (folder, path.parent.absolute())]
    blobs = [Path(found[1]).resolve() / "blobs" for found in snapshots if found]
    if folder not in target.parents and target.parent not in blobs and target.name != path.name:
        raise GraftuneError(
            "is a link to a file of another name outside of its folder",
            where=str(path),
            fix="put a copy of the file in its place",
        )


def check_own_folder(path: Path) -> None:
    """Refuse a link in the place of a folder that a run writes into."""
    if path.is_symlink():
        raise _is_link(path)


def _is_link(path: str | Path) -> GraftuneError:
    what = "is a link, and a run writes into its own folder only"
    return GraftuneError(what, where=str(path), fix="remove it, or put a copy of what it leads to in its place")


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_folder(folder: Path) -> None:
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
    """Yield a neighbouring path to write to. It replaces `path` at the end, or is removed if the body fails."""
    path = Path(path)
    aside = path.with_name(f"{path.name}.{os.getpid()}{PART}" if unique else path.name + PART)
    try:
        if aside.is_symlink():  # writing through it would overwrite another file
            aside.unlink()
        yield aside
        flush(aside)
        os.replace(aside, path)
    except BaseException:  # a full disk or Ctrl-C must not leave half a file
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    flush(path.parent)


@contextmanager
def new_folder(final: str | Path) -> Iterator[Path]:
    """Yield an empty neighbouring folder to fill. It replaces `final` at the end, or is removed if the body fails."""
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
    if not final.exists():  # after a kill, `old` may be the only copy: remove it only after the rename
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
    """`final`, or its old folder if a kill came between the two renames on a system that cannot exchange names."""
    old = final.with_name(final.name + OLD)
    return old if not final.exists() and old.exists() else final


def recover_folder(final: Path) -> None:
    """Clean up after a kill: remove unfinished folders, and give a folder that was renamed aside its name back. Only
    the process that writes there may call this."""
    old = final.with_name(final.name + OLD)
    if final.exists():
        remove(old)
    elif old.is_dir():
        os.rename(old, final)
    remove(final.with_name(final.name + PART))


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_at_once(folder: Path) -> None:
    """Delete a folder after renaming it, so that a kill leaves a folder that is marked as unfinished."""
    aside = folder.with_name(folder.name + PART)
    remove(aside)
    os.rename(folder, aside)
    shutil.rmtree(aside)


def prune_folder(keep: Path, limit: int) -> None:
    """Keep the files beside `keep` that have its ending within `limit` bytes in total by deleting the least recently
    used. Also deletes files that were abandoned half-written. A process that has mapped a deleted file can still
    read it."""
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
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    here, flags = ctypes.c_int(_AT_FDCWD), ctypes.c_uint(_RENAME_EXCHANGE)
    if swap(here, os.fsencode(one), here, os.fsencode(other), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(other))
