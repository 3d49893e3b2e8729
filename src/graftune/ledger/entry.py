"""One reservation in the ledger, as it is read from a file that anybody may have written.

Whoever is in the same namespace of processes asks the kernel whether the process lives: its number and its start, so
that a later process of the same number is not taken for it. A stopped process lives: it keeps its memory. Processes of
other containers cannot be seen. Their entries hold until a lease ends that their heartbeat renews, on a clock that
counts from the machine's start: setting the date changes nothing. Whoever waits holds nothing, and has a lease too.
"""

from __future__ import annotations

import dataclasses
import os
import pwd
import socket
import time
from dataclasses import dataclass
from typing import Any

from graftune.errors import one_line
from graftune.io.lock import process_start

HOST = "host"  # the device of runs on a CPU: the machine's memory
LEASE = 60.0  # seconds for which an entry of a process that cannot be seen holds without a heartbeat
LONGEST_TEXT, MOST_BYTES, MOST_NUMBER = 200, 1 << 60, 1 << 62
LATEST = 1 << 35  # Unix seconds, in the year 3058: no calendar knows what a float can hold
_MOST = {"planned": MOST_BYTES, "measured": MOST_BYTES, "pid": (1 << 31) - 1, "started": LATEST}
_SHOWN = ("task", "user", "host")  # texts for people; the others are compared


@dataclass(frozen=True)
class Entry:
    """`granted`: the memory is reserved; otherwise whoever made it waits for it."""

    id: str
    group: str  # the run: its ranks, and its claims on several devices, are not in each other's way
    device: str  # the GPU's UUID, or `HOST`
    planned: int  # bytes that its plan says it will take
    measured: int  # bytes of these that it has taken
    task: str
    user: str
    host: str
    pid: int
    began: str  # when the process started, in the system's count
    namespace: str  # of processes, in which `pid` means this one
    started: float  # Unix seconds, for people
    expires: float  # on `clock`
    ticket: int  # its place in the queue: the lowest is first
    granted: bool

    @property
    def booked(self) -> int:
        return max(self.planned, self.measured)

    @property
    def pending(self) -> int:
        """Bytes that were promised to it and that still look free."""
        return max(0, self.planned - self.measured)

    def lives(self, now: float) -> bool:
        current = 0 < self.expires - now <= LEASE + 1
        if self.namespace != namespace() or not self.began:
            return current
        found = process_start(self.pid)
        if found == "":  # others' processes may be hidden
            return current
        return found == self.began and (self.granted or current)

    def document(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_FIELDS = {field.name: str(field.type) for field in dataclasses.fields(Entry)}


def read_entry(found: Any) -> Entry:
    """ValueError if it is not what an entry looks like."""
    if not isinstance(found, dict) or found.keys() != _FIELDS.keys():
        raise ValueError("an entry has other fields")
    for name, kind in _FIELDS.items():
        value = found[name]
        if kind == "float" and type(value) is int and abs(value) <= MOST_NUMBER:
            found = {**found, name: float(value)}
        elif type(value).__name__ != kind:
            raise ValueError(f"{name} is not of type {kind}")
        if kind == "str":
            if len(value) > LONGEST_TEXT or not (name in _SHOWN or value.isprintable()):
                raise ValueError(f"{name} is too long or not printable")
            if name in _SHOWN:
                found = {**found, name: _shown(value)}
        elif not (1 if name == "pid" else 0) <= value <= _MOST.get(name, MOST_NUMBER):  # which NaN is not
            raise ValueError(f"{name} is out of range")
    return Entry(**found)


def _shown(text: str) -> str:
    """On one line, without escapes, and no longer than an entry may hold, whatever is put in for a secret."""
    return one_line(text, LONGEST_TEXT - 3)


def new_entry(device: str, planned: int, task: str, group: str) -> Entry:
    """Of this process, not entered yet."""
    pid = os.getpid()
    return Entry(
        id=os.urandom(16).hex(),
        group=group or os.urandom(16).hex(),
        device=device[:LONGEST_TEXT],
        planned=planned,
        measured=0,
        task=one_line(task, LONGEST_TEXT // 2),
        user=_shown(_user()),
        host=_shown(socket.gethostname()),
        pid=pid,
        began=process_start(pid) or "",
        namespace=namespace(),
        started=round(time.time(), 3),
        expires=clock() + LEASE,
        ticket=0,
        granted=False,
    )


def clock() -> float:
    """Seconds since the machine's start, the same in all of its processes, whatever is done to its date. They do not
    pass while the machine sleeps, and its processes with it."""
    return time.monotonic()


def namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()[:LONGEST_TEXT]


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # containers often have no name for it
        return str(os.getuid())
