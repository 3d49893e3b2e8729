"""The ledger file and its lock, the bytes left of a device, the queue, and a claim on memory.

    no other run on the device      all free memory
    other runs on the device        share * total - their booked bytes, at most the free memory that is not reserved

A claim books its plan or what it has allocated, whichever is larger. The driver reports free memory, so programs
without a reservation count, too.

The queue is strict: no claim is granted while an earlier one waits for the same device, however small it is, so small
runs cannot overtake a large one for ever. Each waiting process looks at the file by itself and writes its own grant.
Rejected: a server that grants memory, because a user would have to start and watch it.

The file is one JSON document, replaced by rename under a lock on a second file: a lock on the renamed file itself would
not exclude a process that opens the new one. The folder is writable for all users of the machine, who are assumed to be
colleagues. A document that cannot be read is moved aside with a warning, and heartbeats enter the live claims again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from graftune.errors import GraftuneError
from graftune.io.files import open_own
from graftune.io.json_file import read_json
from graftune.ledger.reservation import LEASE, Reservation, clock, new_reservation, read_reservation

VARIABLE = "GRAFTUNE_LEDGER"
FOLDER = "/tmp/graftune-reservations"  # noqa: S108 (every user of the machine has to reach it)
SHARE = 0.85  # of a device's memory that several claims may reserve together
HEARTBEAT = 3.0  # seconds
FIRST_WAIT, LONGEST_WAIT = 0.2, 1.5  # seconds between two attempts of a waiting claim
LOCK_TIMEOUT = 20.0  # seconds; processes hold the lock for milliseconds


@dataclass(frozen=True)
class Memory:
    """A device's bytes, as its driver reports them now."""

    total: int
    free: int


@dataclass(frozen=True)
class Availability:
    """What a claim finds on its device."""

    left: int  # bytes that it may take
    holders: tuple[Reservation, ...]  # granted to other runs
    ahead: tuple[Reservation, ...]  # of other runs that have waited for longer

    @property
    def alone(self) -> bool:
        return not self.holders and not self.ahead


class Ledger:
    """The file of reservations, shared by all runs of a machine. `warn` gets a sentence when the file was damaged."""

    def __init__(self, folder: str | os.PathLike[str], *, warn: Callable[[str], None] = lambda _: None):
        self.folder, self.warn = Path(folder), warn
        # One file per boot: after a restart no reservation is left, and machines may share the folder.
        self.path = self.folder / f"ledger-{_boot_id()}.json"

    def check(self) -> None:
        """Raises GraftuneError where the ledger cannot be written."""
        with self.locked():
            pass

    def reservations(self) -> list[Reservation]:
        """The reservations of live processes, the holders before the queue. Writes nothing."""
        return sorted(self._live(), key=lambda one: (one.device, not one.granted, one.ticket))

    def available(self, device: str, memory: Memory, *, share: float = SHARE, group: str = "") -> Availability:
        """What a new claim of this group would find now."""
        return _available(self._live(), new_reservation(device, 0, "", group), memory, share)

    def claim(self, device: str, planned: int, *, task: str, share: float = SHARE, group: str = "") -> Claim:
        """A claim that has reserved nothing yet. Claims of one `group` do not wait for each other."""
        return Claim(self, new_reservation(device, planned, task, group), share)

    @contextmanager
    def locked(self) -> Iterator[list[Reservation]]:
        """The live reservations, under the lock. Changes to the list are written at the end."""
        try:
            self._make_folder()
            with _locked(self.path.with_suffix(".lock")):
                found = self._live(repair=True)
                before = list(found)
                yield found
                if found != before or not self.path.exists():
                    self._write(found)
        except OSError as error:
            raise GraftuneError(
                f"the ledger of reserved memory cannot be used ({error.strerror or error})",
                where=str(self.path),
                fix=f"set {VARIABLE} to a folder, not a sticky one, that everybody who shares the GPU can write to, or "
                "to off",
            ) from None

    def _live(self, *, repair: bool = False) -> list[Reservation]:
        """The reservations of live processes. `repair`: move aside a file that cannot be read; otherwise that raises
        GraftuneError."""
        try:
            found = [read_reservation(one) for one in read_json(self.path)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (ValueError, TypeError):
            where = self.path.with_name(f"{self.path.name}.damaged")
            if not repair:
                raise GraftuneError(
                    "the ledger of reserved memory is damaged", where=str(self.path), fix="the next run repairs it"
                ) from None
            os.replace(self.path, where)
            self.warn(f"{self.path} was damaged and moved to {where}; running processes reserve their memory again")
            return []
        now = clock()
        return [one for one in found if one.is_alive(now)]

    def _write(self, reservations: list[Reservation]) -> None:
        """Not flushed to the disk: after a crash of the machine no process holds memory."""
        aside = self.path.with_suffix(".part")
        aside.unlink(missing_ok=True)  # a process was killed while it wrote
        with open(aside, "x") as file:
            json.dump([one.document() for one in reservations], file, indent=0)
            os.fchmod(file.fileno(), 0o666)  # by the handle: the name may have become a link
        os.replace(aside, self.path)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True)
        except FileExistsError:
            return
        self.folder.chmod(0o777)  # not sticky: every user replaces the file


class Claim:
    """Memory of a device for this process: `take` or `wait` requests it, `keep` renews it, `release` returns it."""

    def __init__(self, ledger: Ledger, reservation: Reservation, share: float):
        self.ledger, self.reservation, self.share = ledger, reservation, share
        self._released = threading.Event()

    @property
    def granted(self) -> bool:
        return self.reservation.granted

    def take(self, memory: Memory, *, queue: bool = False) -> Availability:
        """Reserves the memory if it fits. `queue`: otherwise the claim waits in the queue."""
        with self.ledger.locked() as reservations:
            ticket = self.reservation.ticket or _ticket(reservations, self.reservation.group)
            mine = replace(self.reservation, ticket=ticket)
            found = _available(reservations, mine, memory, self.share)
            granted = mine.planned <= found.left
            if granted or queue:
                self._put(reservations, replace(mine, granted=granted))
            return found

    def register(self) -> None:
        """Records memory that is allocated already; nothing is refused."""
        with self.ledger.locked() as reservations:
            self._put(reservations, replace(self.reservation, measured=self.reservation.planned, granted=True))

    def wait(
        self, memory: Callable[[], Memory], seconds: float, waiting: Callable[[Availability], None] = lambda _: None
    ) -> Availability:
        """Try until the claim is granted or `seconds` have passed; then leave the queue. `waiting` is called after
        every attempt that failed."""
        limit, pause = time.monotonic() + seconds, FIRST_WAIT
        try:
            while True:
                found = self.take(memory(), queue=seconds > 0)
                left = limit - time.monotonic()
                if self.granted or left <= 0:
                    return found
                waiting(found)
                time.sleep(min(pause, left))
                pause = min(1.5 * pause, LONGEST_WAIT)
        finally:
            if not self.granted:
                self.release()

    def keep(self, measure: Callable[[], int]) -> None:
        """Renews the claim from a thread until it is released. `measure` returns the bytes that the process has
        allocated, without waiting for the device; bytes from before the claim are not counted."""
        began = measure() - self.reservation.measured

        def heartbeat() -> None:
            warned = False
            while not self._released.wait(HEARTBEAT):
                try:
                    self.renew(max(0, measure() - began))
                except (GraftuneError, OSError) as error:  # the second: no file handle left to measure with
                    if not warned:
                        self.ledger.warn(f"{error} (this run goes on)")
                    warned = True

        threading.Thread(target=heartbeat, name="graftune-ledger", daemon=True).start()

    def renew(self, measured: int) -> None:
        """Renews the lease and records the allocated bytes. A reservation that was lost is entered again."""
        with self.ledger.locked() as reservations:
            if not self._released.is_set():
                self._put(reservations, replace(self.reservation, measured=measured))

    def release(self) -> None:
        """Returns the memory, once. A forked child's copy of the claim does nothing."""
        if self.reservation.pid != os.getpid() or self._released.is_set():
            return
        self._released.set()
        with self.ledger.locked() as reservations:
            self._remove(reservations)
        self.reservation = replace(self.reservation, granted=False)

    def _put(self, reservations: list[Reservation], mine: Reservation) -> None:
        self._remove(reservations)
        self.reservation = replace(mine, expires=clock() + LEASE)
        reservations.append(self.reservation)

    def _remove(self, reservations: list[Reservation]) -> None:
        reservations[:] = [one for one in reservations if one.id != self.reservation.id]


def shared_ledger(warn: Callable[[str], None] = lambda _: None) -> Ledger | None:
    """This machine's ledger, in the folder that GRAFTUNE_LEDGER names; None where that is `off`."""
    folder = os.environ.get(VARIABLE, "") or FOLDER
    return None if folder.lower() == "off" else Ledger(Path(folder).expanduser().resolve(), warn=warn)


def _available(reservations: list[Reservation], mine: Reservation, memory: Memory, share: float) -> Availability:
    others = [one for one in reservations if one.device == mine.device and one.id != mine.id]
    held = [one for one in others if one.granted]
    holders = tuple(one for one in held if one.group != mine.group)
    ticket = mine.ticket or _ticket(reservations, mine.group)
    queue = sorted((one for one in others if not one.granted), key=lambda one: one.ticket)
    ahead = tuple(one for one in queue if one.group != mine.group and one.ticket < ticket)
    left = memory.free - sum(one.pending for one in held)
    if holders:
        left = min(left, int(share * memory.total) - sum(one.booked for one in held))
    return Availability(0 if ahead else max(0, left), holders, ahead)


def _ticket(reservations: list[Reservation], group: str) -> int:
    """The place in the queue of a run's claim. A run keeps the ticket of its first claim: later ones must not wait for
    a run that waits for the first. Tickets are times, taken under the lock, in order also after the file was lost."""
    return min((one.ticket for one in reservations if one.group == group), default=time.monotonic_ns())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of the file at `path`."""
    limit, new = time.monotonic() + LOCK_TIMEOUT, not path.exists()
    handle = open_own(path)
    try:
        if new:
            os.fchmod(handle, 0o666)
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > limit:  # the other process was stopped at the wrong moment
                    text = f"another process has kept it locked for {LOCK_TIMEOUT:g} s"
                    raise OSError(errno.ETIMEDOUT, text) from None
                time.sleep(0.005)
        os.utime(handle)  # programs that clean /tmp remove files that look unused
        yield
    finally:
        with suppress(OSError):  # a disk without locks
            fcntl.flock(handle, fcntl.LOCK_UN)  # a child forked meanwhile has the file open, too
        os.close(handle)


def _boot_id() -> str:
    """The kernel's id of this boot, the same in all containers; the machine's name where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
