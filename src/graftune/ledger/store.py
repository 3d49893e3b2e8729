"""The ledger's file, in a folder that several users can write to, and the lock beside it.

The lock is on a file of its own that is never replaced: a lock on a file that is then renamed over keeps nobody out who
opens the new one. In a folder like /tmp nobody may rename over the file of another user either, so the ledger is
written in place, twice: first a copy, then the ledger. A writer that is killed leaves one of the two whole, as their
checksums say. Nothing is flushed to the disk: after a crash of the machine nobody holds memory, and the file's name has
the number of this boot.

What others can write is not trusted: links, pipes and files with a second name are refused, sizes and fields checked.
A ledger that is damaged is put aside, an empty one is written at once, and everybody is given time to enter again
before anything is granted: whoever holds memory renews its entry, and finds that it is gone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graftune.errors import GraftuneError
from graftune.io.files import PART, remove
from graftune.ledger.entry import MOST_NUMBER, Entry, clock, read_entry

VARIABLE = "GRAFTUNE_LEDGER"
PLACE = "/tmp/graftune-ledger"  # noqa: S108 (which every user can write to; `_open` checks what others left there)
LARGEST = 1 << 20  # bytes of a ledger
MOST_ENTRIES = 1000
PATIENCE = 20.0  # seconds for the lock, which nobody keeps for more than some milliseconds
LITTER = 86400.0  # seconds after which the files of another boot go
PEEKS = 20
MENDED_BY = "the next run that starts puts it aside"
MEND = f"set {VARIABLE} to a folder that everybody who shares the GPU can write to, or to off"


@dataclass
class State:
    """What the file holds."""

    entries: list[Entry] = field(default_factory=list)
    next_ticket: int = 1
    settles: float = 0.0  # on `clock`: until then nothing is granted, since entries may have been lost


class Store:
    """`tell` gets a sentence when a ledger was damaged. `settling`: seconds in which everybody enters again."""

    def __init__(self, folder: str | Path, *, settling: float, tell: Callable[[str], None] | None = None):
        self.folder, self.settling, self.tell = Path(folder), settling, tell or (lambda _: None)
        self.name = f"ledger-{_boot()}.json"

    @property
    def path(self) -> Path:
        return self.folder / self.name

    @contextmanager
    def locked(self) -> Iterator[State]:
        """The state as it is; what the body makes of it is written at the end. GraftuneError where that cannot be."""
        try:
            with self._opened_folder() as folder, self._lock(folder) as lock:
                before = self._read(folder, known=os.fstat(lock).st_size > 0)
                if before is None:
                    before = State(settles=clock() + self.settling)
                    self._write(folder, lock, before)  # whatever the body does, or everybody would settle for ever
                state = replace(before, entries=list(before.entries))
                yield state
                if state != before:
                    self._write(folder, lock, state)
        except OSError as error:
            raise GraftuneError(
                f"the ledger of reserved memory cannot be used ({error.strerror or error})",
                where=str(self.path),
                fix=MEND,
            ) from None

    def peek(self) -> list[Entry]:
        """The entries, for whoever only looks: nothing is made, locked or mended. A write under way is waited for."""
        if not self.folder.is_dir():
            return []
        with self._opened_folder() as folder:
            for _ in range(PEEKS):
                found = [_content(folder, name, make=False) for name in (self.name, self.name + ".copy")]
                for content in found:
                    with suppress(ValueError, RecursionError):
                        return parsed(content).entries
                if not any(found):
                    return []
                time.sleep(0.01)
        raise GraftuneError("the ledger of reserved memory is damaged", where=str(self.path), fix=MENDED_BY)

    @contextmanager
    def _opened_folder(self) -> Iterator[int]:
        try:
            handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            self._make_folder()
            handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield handle
        finally:
            os.close(handle)

    def _make_folder(self) -> None:
        """As /tmp is: everybody may make files in it, and only their owner takes them away. It has its lock from the
        beginning: over an empty folder another could be renamed, under whoever has just opened it."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        aside = self.folder.with_name(f"{self.folder.name}.{os.getpid()}{PART}")
        aside.mkdir(exist_ok=True)
        try:
            lock = aside / f"{self.name}.lock"
            lock.touch()
            lock.chmod(0o666)
            aside.chmod(0o1777)
            os.rename(aside, self.folder)
        except OSError as error:
            remove(aside)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # these: somebody was faster
                raise

    @contextmanager
    def _lock(self, folder: int) -> Iterator[int]:
        name, limit = self.name + ".lock", time.monotonic() + PATIENCE
        while True:
            handle = _open(folder, name)
            try:
                _wait_for(handle, limit)
                if _is(handle, folder, name):  # and was not cleared away meanwhile
                    yield handle
                    return
            finally:
                with suppress(OSError):  # a child that was forked meanwhile has the file open, too
                    fcntl.flock(handle, fcntl.LOCK_UN)
                os.close(handle)

    def _read(self, folder: int, *, known: bool) -> State | None:
        """None, and that is said, if it was lost. `known`: there has been a ledger."""
        found = {name: _content(folder, name) for name in (self.name, self.name + ".copy")}
        for content in found.values():
            if content:
                with suppress(ValueError, RecursionError):
                    return parsed(content)
        content = next((content for content in found.values() if content), b"")
        if not known and not content:
            self._clear(folder)
            return State()
        what = f"was damaged and {self._put_aside(folder, content)}" if content else "was removed"
        self.tell(f"{self.path} {what}; runs that hold memory enter it again within {self.settling:g} s")
        return None

    def _put_aside(self, folder: int, content: bytes) -> str:
        """Says where. One a user: whoever damages a ledger again and again fills no disk."""
        name = f"{self.name}.damaged-{os.getuid()}"
        try:
            _write_over(folder, name, content)
        except OSError as error:
            return f"could not be put aside ({error.strerror})"
        return f"is put aside as {self.folder / name}"

    def _write(self, folder: int, lock: int, state: State) -> None:
        content = written(state)
        if len(content) > LARGEST or len(state.entries) > MOST_ENTRIES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        for name in (self.name + ".copy", self.name):
            _write_over(folder, name, content)
        os.pwrite(lock, b"1", 0)  # there is a ledger: one that is missing later was lost

    def _clear(self, folder: int) -> None:
        """The ledgers of other boots that nobody has written to for a day."""
        for name in os.listdir(folder):
            if name.startswith("ledger-") and not name.startswith(self.name):
                with suppress(OSError):
                    if time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > LITTER:
                        os.unlink(name, dir_fd=folder)


def place() -> Path | None:
    """GRAFTUNE_LEDGER, or the folder that all users of the machine share; None: there shall be no ledger."""
    asked = os.environ.get(VARIABLE, "")
    if asked.lower() == "off":
        return None
    return Path(asked).expanduser().resolve() if asked else Path(PLACE)


def written(state: State) -> bytes:
    body = {
        "version": 1,
        "next_ticket": state.next_ticket,
        "settles": state.settles,
        "entries": [entry.document() for entry in state.entries],
    }
    return json.dumps({"crc32": _checksum(body), **body}, indent=0).encode() + b"\n"


def parsed(content: bytes) -> State:
    """ValueError if this is no whole ledger, or holds what none of ours would."""
    if len(content) > LARGEST:
        raise ValueError("too large")
    found = json.loads(content, parse_constant=_no_number)
    if not isinstance(found, dict) or found.pop("crc32", None) != _checksum(found):
        raise ValueError("not whole")
    entries, ticket, settles = found.get("entries"), found.get("next_ticket"), found.get("settles")
    if found.get("version") != 1 or not isinstance(entries, list) or len(entries) > MOST_ENTRIES:
        raise ValueError("no ledger")
    if type(ticket) is not int or not 0 < ticket <= MOST_NUMBER:
        raise ValueError("no ledger")
    if not isinstance(settles, int | float) or not 0 <= settles < MOST_NUMBER:  # which NaN and infinity are not
        raise ValueError("no ledger")
    return State([read_entry(entry) for entry in entries], ticket, float(settles))


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number that JSON has")


def _boot() -> str:
    """The kernel's own name for this boot, the same in all of its containers; the machine's where it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:36].replace("/", "-")
    except OSError:
        return os.uname().nodename.replace("/", "-")


def _open(folder: int, name: str, *, make: bool = True) -> int:
    """A plain file of that name; if there is none it is made, or FileNotFoundError raised. Existing ones are opened
    without O_CREAT, which Linux refuses for files of others in a folder like /tmp (fs.protected_regular)."""
    flags = (os.O_RDWR if make else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    while True:
        try:
            handle = os.open(name, flags, dir_fd=folder)
        except FileNotFoundError:
            if not make:
                raise
            try:
                handle = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
            except FileExistsError:
                continue
        found = os.fstat(handle)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            if make and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) != 0o666:
                os.fchmod(handle, 0o666)  # whatever the umask
            return handle
        os.close(handle)
        if found.st_nlink:
            raise OSError(errno.EINVAL, f"{name} is not a plain file")


def _content(folder: int, name: str, *, make: bool = True) -> bytes:
    """At most a byte more than a ledger may have; nothing of a file that is not there."""
    try:
        handle = _open(folder, name, make=make)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(handle, LARGEST + 1, 0)
    finally:
        os.close(handle)


def _write_over(folder: int, name: str, content: bytes) -> None:
    handle = _open(folder, name)
    try:
        done = 0
        while done < len(content):
            done += os.pwrite(handle, content[done:], done)
        os.ftruncate(handle, len(content))
    finally:
        os.close(handle)


def _wait_for(handle: int, limit: float) -> None:
    """The lock, or an error: a process that was stopped while it had it must not stop everybody."""
    pause = 0.0005
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > limit:
                raise OSError(errno.ETIMEDOUT, f"another process has kept it locked for {PATIENCE:g} s") from None
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _is(handle: int, folder: int, name: str) -> bool:
    try:
        there = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(handle)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
