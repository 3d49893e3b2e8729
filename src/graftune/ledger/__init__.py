"""The ledger: how much memory of which device each process on this machine has reserved.

A run that is still loading has allocated little of what it will need, so free memory alone cannot tell two runs that
start together that only one of them fits. Each run reserves the bytes of its plan before it loads anything, and plans
within the bytes that the others leave.

reservation.py   one reservation, and whether its process is alive
ledger.py        the shared file and its lock, the bytes left of a device, the queue, and a claim on memory

Nothing here imports torch: the caller passes a device's total and free memory.
"""

from __future__ import annotations

from graftune.ledger.ledger import SHARE, VARIABLE, Availability, Claim, Ledger, Memory, shared_ledger
from graftune.ledger.reservation import HOST, LEASE, Reservation

__all__ = [
    "HOST", "LEASE", "SHARE", "VARIABLE", "Availability", "Claim", "Ledger", "Memory", "Reservation", "shared_ledger",
]  # fmt: skip
