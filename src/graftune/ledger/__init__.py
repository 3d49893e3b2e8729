"""Which processes have reserved how much memory of which device: a ledger that they share.

A run that is still loading has taken little of what it will take, so free memory does not tell two runs that start
together that only one of them fits. Each enters what its plan says before it loads anything, under one lock, and sees
what the others have entered.

entry.py   one reservation, and whether whoever made it still lives
store.py   the file of entries, in a folder that several users can write to, and its lock
book.py    what is left of a device, the queue for it, and a claim on it

Nothing here needs torch: how much memory a device has, and how much of it is free, is given by the caller.
"""

from __future__ import annotations

from graftune.ledger.book import BEAT, SHARE, Claim, Ledger, Memory, Room, shared_ledger
from graftune.ledger.entry import HOST, LEASE, Entry
from graftune.ledger.store import VARIABLE

__all__ = ["BEAT", "HOST", "LEASE", "SHARE", "VARIABLE", "Claim", "Entry", "Ledger", "Memory", "Room", "shared_ledger"]
