"""The claim of a process on a run folder: taken by whoever trains there, read by whoever watches.

The lock itself belongs to an open file, so it dies with its process, however that ends. Beside it the file says who
holds it: the process, when that process started, and the machine, so that others can ask without taking the lock. While
it is held a thread renews the file's time every few seconds: a heartbeat for those who cannot see the process, on other
machines of a shared disk or outside of its container. Rejected: /proc/locks, which lists no lock of another container,
and in some sandboxes none at all.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from graftune.errors import GraftuneError
from graftune.io.files import open_own

LOCK = ".lock"
BEAT = 5.0  # seconds between two heartbeats
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Holder:
    """Who holds a lock."""

    pid: int
    began: str  # when the process started, in the system's own count: tells it from a later one of the same number
    machine: str  # where that number means this process
    since: float  # Unix seconds: when the lock was taken
    file: int = 0  # the number (inode) of the lock's file, which a copy of the folder does not have; 0: not known

    @staticmethod
    def me(file: int = 0) -> Holder:
        return Holder(os.getpid(), process_start(os.getpid()) or "", machine(), round(time.time(), 3), file)

    @staticmethod
    def read(content: bytes) -> Holder | None:
        """Of the lock file's content; None if it names nobody."""
        try:
            found = json.loads(content)
            who = int(found["pid"]), str(found["began"]), str(found["machine"])
            return Holder(*who, float(found["since"]), int(found.get("file", 0)))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, AttributeError):
            return None

    @property
    def is_here(self) -> bool:
        return self.machine == machine()

    @property
    def lives(self) -> bool:
        """Whether the process is there; asked of one that is here."""
        found = process_start(self.pid)
        return found == self.began if self.began else found is not None


def machine() -> str:
    """The host, and where there are several namespaces of processes on it, which one."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


def process_start(pid: int) -> str | None:
    """When a process started, in the system's own count. None: there is no such process, or it has ended and nobody has
    asked how. Empty: the system does not say, or hides the processes of others."""
    with suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else fields[19].decode("ascii")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except (PermissionError, OverflowError):
        return ""
    return ""


class FolderLock:
    """One process at a time writes to a folder. Never waits. The file stays, and is empty when nobody holds it.

    `unsupported` is why there is no lock, on file systems that have none: whoever asked should say so."""

    def __init__(self, folder: str | Path):
        self.path, self.unsupported = Path(folder) / LOCK, ""
        self._handle = -1
        self._released, self._closing = threading.Event(), threading.Lock()

    def acquire(self) -> FolderLock:
        while self._handle < 0:
            handle = open_own(self.path)
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
        try:
            os.ftruncate(self._handle, 0)
            me = Holder.me(os.fstat(self._handle).st_ino)
            os.pwrite(self._handle, json.dumps(asdict(me)).encode() + b"\n", 0)
        except OSError as error:  # a full disk
            self.release()
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self._released.clear()
        threading.Thread(target=self._beat, args=(self._handle,), name="heartbeat", daemon=True).start()
        return self

    def _beat(self, handle: int) -> None:
        """Renew the file's time until the lock is released. A disk that refuses once may take the next one."""
        while not self._released.wait(BEAT):
            with self._closing, suppress(OSError):
                if not self._released.is_set():  # or the number may be another file's by now
                    os.utime(handle)

    def _lock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = Holder.read(os.pread(handle, 4096, 0))
            who = "another process" if owner is None else f"process {owner.pid}"
            raise GraftuneError(
                f"{who} is training in this folder",
                where=str(self.path.parent),
                fix="wait until it is done, or stop it",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.unsupported = os.strerror(error.errno)

    def _is(self, handle: int) -> bool:
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        mine = os.fstat(handle)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self) -> None:
        if self._handle >= 0:
            self._released.set()
            with self._closing:
                with suppress(OSError):
                    os.ftruncate(self._handle, 0)
                os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> FolderLock:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
