"""What is left of a device, the queue for it, and a claim on it.

    alone on the device        all that is free
    beside others' claims      share * total - what they have booked, and no more than is free and promised to nobody

A claim books the larger of its plan and of what it has taken. What is free comes from the driver, so programs that know
nothing of the ledger count too; of that, what others were promised and have not taken yet is not free.

The queue is strict: nobody is granted memory while somebody who came earlier waits for the same device, however little
it would be, so a large run is never overtaken for ever by small ones. The claims of one run have one place in it. Each
waiter looks by itself, at first every fifth of a second, and enters its own grant; nobody has to be woken, and one who
dies leaves no gap. Rejected: a server that grants, which somebody would have to start and keep.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType

from graftune.errors import GraftuneError
from graftune.ledger.entry import LEASE, MOST_NUMBER, Entry, clock, new_entry
from graftune.ledger.store import State, Store, place

BEAT = 3.0  # seconds between two heartbeats of a claim
SHARE = 0.85  # of a device's memory that claims may come to while there are several
SHORTEST, LONGEST = 0.2, 1.5  # seconds between two looks of a waiter


@dataclass(frozen=True)
class Memory:
    """Of a device, as its driver sees it now."""

    total: int
    free: int


@dataclass(frozen=True)
class Room:
    """What a claim finds on its device."""

    left: int  # bytes that it may take
    holders: tuple[Entry, ...]  # that others have been granted
    ahead: tuple[Entry, ...]  # others' claims that wait and came earlier
    settling: bool = False  # entries may have been lost: nothing is granted yet

    @property
    def alone(self) -> bool:
        return not self.holders and not self.ahead

    def takes(self, size: int) -> bool:
        return size <= self.left and not self.settling


class Ledger:
    """`tell` gets a sentence about what was wrong with the file."""

    def __init__(self, folder: str | os.PathLike[str], *, tell: Callable[[str], None] | None = None):
        self.store = Store(os.fspath(folder), settling=2 * BEAT, tell=tell)
        self.tell = self.store.tell

    def check(self) -> None:
        """GraftuneError, in one sentence, where the ledger cannot be written."""
        with self.store.locked() as state:
            _prune(state)

    def entries(self) -> list[Entry]:
        """Of all that live, the holders before the queue. Only looks."""
        now = clock()
        living = [entry for entry in self.store.peek() if entry.lives(now)]
        return sorted(living, key=lambda entry: (entry.device, not entry.granted, entry.ticket))

    def room(self, device: str, memory: Memory, *, share: float = SHARE, group: str = "") -> Room:
        """What a claim of this group would find now."""
        with self.store.locked() as state:
            _prune(state)
            return _room(state, new_entry(device, 0, "", group), memory, share)

    def look(self, device: str, memory: Memory, *, share: float = SHARE) -> Room:
        """What a claim would find, for whoever only wants to know."""
        return _room(State(self.entries()), new_entry(device, 0, "", ""), memory, share)

    def claim(self, device: str, planned: int, *, task: str, share: float = SHARE, group: str = "") -> Claim:
        """Not entered before it is taken. Claims of one `group` are not in each other's way."""
        return Claim(self, new_entry(device, planned, task, group), share)


class Claim:
    """Memory of a device for this process: asked for with `take` or `wait`, kept alive by `keep`, given back with
    `release`. `entry.granted` says whether it has been granted."""

    def __init__(self, ledger: Ledger, entry: Entry, share: float):
        self.ledger, self.entry, self.share = ledger, entry, share
        self._over = threading.Event()

    @property
    def granted(self) -> bool:
        return self.entry.granted

    def take(self, memory: Memory, *, queue: bool = False) -> Room:
        """Granted if it fits. `queue`: otherwise it is entered, or stays, as one that waits."""
        with self.ledger.store.locked() as state:
            _prune(state)
            mine = _found(state, self.entry.id)
            if not self.entry.ticket:
                self.entry = replace(self.entry, ticket=_ticket(state, self.entry.group))
            room = _room(state, self.entry, memory, self.share)
            granted = room.takes(self.entry.planned)
            if granted or queue:
                state.next_ticket = min(max(state.next_ticket, self.entry.ticket + 1), MOST_NUMBER)
                self._put(state, mine, replace(self.entry, granted=granted))
            else:
                self.entry = replace(self.entry, ticket=0)
            return room

    def enter(self) -> None:
        """Without asking: the memory is taken already."""
        with self.ledger.store.locked() as state:
            _prune(state)
            self._put(state, None, replace(self.entry, measured=self.entry.planned, granted=True))

    def wait(self, memory: Callable[[], Memory], seconds: float, told: Callable[[Room], None] | None = None) -> Room:
        """Until it is granted, or `seconds` have passed and its place in the queue is given up. A ledger that has just
        been lost is waited for in any case. `told` is called after every look that granted nothing."""
        limit, pause = time.monotonic() + seconds, SHORTEST
        try:
            while True:
                room = self.take(memory(), queue=seconds > 0)
                left = limit - time.monotonic()
                if self.granted or (left <= 0 and not room.settling):
                    return room
                if told:
                    told(room)
                time.sleep(max(0.01, min(pause, left)) if left > 0 else SHORTEST)
                pause = min(1.5 * pause, LONGEST)
        finally:
            if not self.granted:
                self.release()

    def keep(self, measure: Callable[[], int] | None = None) -> None:
        """Renew the claim from a thread until it is released. `measure` gives what the process has taken so far of such
        memory; it must not wait for the device. What it had before its claim is not counted."""
        began = measure() - self.entry.measured if measure else 0

        def beats() -> None:
            said = False
            while not self._over.wait(BEAT):
                try:
                    self.beat(max(0, measure() - began) if measure else 0)
                except (GraftuneError, OSError) as error:  # the second: no handle left to measure with
                    if not said:
                        self.ledger.tell(f"{error} (this run goes on)")
                    said = True

        threading.Thread(target=beats, name="graftune-ledger", daemon=True).start()

    def beat(self, measured: int) -> None:
        """Renew the lease and say how much was taken. An entry that was lost is entered again."""
        with self.ledger.store.locked() as state:
            if not self._over.is_set():
                self._put(state, _found(state, self.entry.id), replace(self.entry, measured=measured))

    def release(self) -> None:
        """Once; a forked child's copy releases nothing."""
        if self.entry.pid != os.getpid() or self._over.is_set():
            return
        self._over.set()
        with self.ledger.store.locked() as state:
            state.entries = [entry for entry in state.entries if entry.id != self.entry.id]
        self.entry = replace(self.entry, granted=False)

    def _put(self, state: State, mine: int | None, entry: Entry) -> None:
        self.entry = replace(entry, expires=clock() + LEASE)
        if mine is None:
            state.entries.append(self.entry)
        else:
            state.entries[mine] = self.entry

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def shared_ledger(tell: Callable[[str], None] | None = None) -> Ledger | None:
    """The one of this machine; None where GRAFTUNE_LEDGER is off."""
    folder = place()
    return None if folder is None else Ledger(folder, tell=tell)


def _room(state: State, mine: Entry, memory: Memory, share: float) -> Room:
    others = [entry for entry in state.entries if entry.device == mine.device and entry.id != mine.id]
    held = [entry for entry in others if entry.granted]
    strangers = tuple(entry for entry in held if entry.group != mine.group)
    first = mine.ticket or _ticket(state, mine.group)
    ahead = [entry for entry in others if not entry.granted and entry.group != mine.group and entry.ticket < first]
    left = memory.free - sum(entry.pending for entry in held)
    if strangers:
        left = min(left, int(share * memory.total) - sum(entry.booked for entry in held))
    if ahead:
        left = 0
    queue = tuple(sorted(ahead, key=lambda entry: entry.ticket))
    now = clock()
    # Nobody settles for longer than a lease: a later time is not ours.
    return Room(max(0, left), strangers, queue, settling=0 < state.settles - now <= LEASE)


def _ticket(state: State, group: str) -> int:
    """A run keeps the place of its first claim: its others must not wait for somebody who waits for it."""
    mine = [entry.ticket for entry in state.entries if entry.group == group]
    # By the clock, so that whoever comes after a ledger was lost is still behind those who waited before.
    return min(mine, default=max(state.next_ticket, int(1000 * clock())))


def _found(state: State, id: str) -> int | None:
    return next((number for number, entry in enumerate(state.entries) if entry.id == id), None)


def _prune(state: State) -> None:
    now = clock()
    state.entries = [entry for entry in state.entries if entry.lives(now)]
