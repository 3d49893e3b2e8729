"""The lock of a run folder: the training process holds it, and the dashboard reads which process that is.

The lock belongs to an open file, so it ends with its process. The file's content names the owner: the process, when it
started, and the machine, so that others can read it without taking the lock. While the lock is held a thread renews the
file's time every few seconds, a heartbeat for readers that cannot see the process, on other machines of a shared disk
or outside of its container. Rejected: /proc/locks, which lists no lock of another container, and in some sandboxes
none at all.
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
class LockOwner:
    pid: int
    began: str  # when the process started, in the kernel's clock ticks: a later process with the same pid has another
    machine: str  # the host and pid namespace in which the pid is valid
    since: float  # Unix seconds: when the lock was taken
    file: int = 0  # the inode of the lock's file, which differs in a copy of the folder; 0: not known

    @staticmethod
    def me(file: int = 0) -> LockOwner:
        return LockOwner(os.getpid(), process_start(os.getpid()) or "", machine(), round(time.time(), 3), file)

    @staticmethod
    def read(content: bytes) -> LockOwner | None:
        """Read the lock file's content; None if the lock is free."""
        try:
            found = json.loads(content)
            who = int(found["pid"]), str(found["began"]), str(found["machine"])
            return LockOwner(*who, float(found["since"]), int(found.get("file", 0)))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, AttributeError):
            return None

    @property
    def is_here(self) -> bool:
        return self.machine == machine()

    @property
    def lives(self) -> bool:
        """Whether the process still runs; call it only if `is_here`."""
        found = process_start(self.pid)
        return found == self.began if self.began else found is not None


def machine() -> str:
    """The name of the host, and the namespace of process ids if the system tells it."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


def process_start(pid: int) -> str | None:
    """When a process started, in the kernel's clock ticks. None: there is no such process, or it is a zombie. Empty:
    the system does not say, or hides the processes of other users."""
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
    """Lets one process at a time write to a folder. Never waits. The file stays, and is empty while the lock is free.

    `unsupported`: the reason why this file system has no locks, which the caller reports."""

    def __init__(self, folder: str | Path):
        self.path, self.unsupported = Path(folder) / LOCK, ""
        self._released = threading.Event()

    def acquire(self) -> FolderLock:
        self._handle = open_own(self.path)
        try:
            self._lock()
            os.ftruncate(self._handle, 0)
            me = LockOwner.me(os.fstat(self._handle).st_ino)
            os.pwrite(self._handle, json.dumps(asdict(me)).encode() + b"\n", 0)
        except BaseException as error:
            os.close(self._handle)
            if isinstance(error, OSError):  # a full disk
                raise OSError(error.errno, error.strerror, str(self.path)) from None
            raise
        self._released.clear()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def _beat(self) -> None:
        """Renew the file's time until the lock is released. After a failure, the next beat tries again."""
        while not self._released.wait(BEAT):
            with suppress(OSError):
                os.utime(self._handle)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = LockOwner.read(os.pread(self._handle, 4096, 0))
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

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        with suppress(OSError):
            os.ftruncate(self._handle, 0)
        os.close(self._handle)

    def __enter__(self) -> FolderLock:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
