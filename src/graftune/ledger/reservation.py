"""One reservation in the ledger, and whether the process that made it is alive.

In the same PID namespace the kernel says whether a process is alive; its number and its start time identify it, so a
later process with the same number does not match. A stopped process is alive, because it keeps its memory. Processes of
other containers cannot be seen: their reservations expire unless their heartbeat renews them. Leases use the monotonic
clock, which all processes of a machine share and which does not change with the date. A waiting process must renew its
place in the queue in any case.
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
from graftune.io.lock import machine, process_start

HOST = "host"  # the device name of runs on the CPU: the machine's memory
LEASE = 60.0  # seconds after its last heartbeat until the reservation of an invisible process expires
LONGEST_TEXT = 200
MOST = {"int": 1 << 62, "float": 1 << 35}  # the float is in seconds, up to the year 3058, which localtime accepts


@dataclass(frozen=True)
class Reservation:
    """Memory that a process has reserved (`granted`), or waits for in the queue."""

    id: str
    group: str  # the run; its ranks and its claims on several devices share one place in the queue
    device: str  # the GPU's UUID, or `HOST`
    planned: int  # bytes that the plan needs
    measured: int  # bytes that the process has allocated so far
    task: str
    user: str
    host: str
    pid: int
    process_start: str  # as the kernel counts it
    machine: str  # host and PID namespace in which `pid` is valid
    started: float  # Unix seconds, for display
    expires: float  # on the monotonic clock
    ticket: int  # place in the queue: the lowest is first
    granted: bool

    @property
    def booked(self) -> int:
        return max(self.planned, self.measured)

    @property
    def pending(self) -> int:
        """Bytes that are reserved but still look free to the driver."""
        return max(0, self.planned - self.measured)

    def is_alive(self, now: float) -> bool:
        renewed = 0 < self.expires - now <= LEASE + 1
        started = process_start(self.pid) if self.machine == machine() and self.process_start else ""
        if started == "":  # the process is invisible: in another container, or hidden by the system
            return renewed
        return started == self.process_start and (self.granted or renewed)

    def document(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_TYPES = {field.name: str(field.type) for field in dataclasses.fields(Reservation)}


def read_reservation(found: Any) -> Reservation:
    """Raises ValueError unless all fields are there with their types: other users can write to the file."""
    if not isinstance(found, dict) or found.keys() != _TYPES.keys():
        raise ValueError("a reservation has other fields")
    for name, kind in _TYPES.items():
        value = found[name]
        if type(value).__name__ != kind:
            raise ValueError(f"{name} is not of type {kind}")
        if kind == "str":
            found = {**found, name: one_line(value, LONGEST_TEXT)}
        elif not 0 <= value <= MOST.get(kind, 1):  # NaN fails this, too
            raise ValueError(f"{name} is out of range")
    return Reservation(**found)


def new_reservation(device: str, planned: int, task: str, group: str) -> Reservation:
    """A reservation of this process, which is not in the ledger yet."""
    return Reservation(
        id=os.urandom(16).hex(),
        group=group or os.urandom(16).hex(),
        device=device,
        planned=planned,
        measured=0,
        task=one_line(task, LONGEST_TEXT),
        user=_user(),
        host=socket.gethostname(),
        pid=os.getpid(),
        process_start=process_start(os.getpid()) or "",
        machine=machine(),
        started=round(time.time(), 3),
        expires=clock() + LEASE,
        ticket=0,
        granted=False,
    )


def clock() -> float:
    return time.monotonic()


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # containers often have no name for it
        return str(os.getuid())
