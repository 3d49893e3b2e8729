"""Counts live bytes by owner while tensors are made and freed.

A dispatch mode (counting.py) sees every operation of torch; a storage that was not there before is new, and a weak
reference on it says when it is freed. Live bytes are counted by owner, so that the moment of the peak can be split by
owner too. Asking the allocator instead would need the device, and its peak has no owners.

It counts as CUDA's caching allocator does (`block_bytes`), or on the host the bytes themselves.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graftune.arithmetic import ceil_div
from graftune.private import storage_id

MIB = 1 << 20
SCRATCH, MAPPED = "scratch", "mapped"  # mapped tensors lie in a file's pages and take no memory


def block_bytes(size: int) -> int:
    """What the caching allocator counts for a tensor: whole units of 512 bytes. Ten MiB and more are asked of the
    driver in whole 2 MiB, and what is left over of that is split off for others only if it is more than one MiB."""
    rounded = ceil_div(size, 512) * 512
    whole = ceil_div(rounded, 2 * MIB) * 2 * MIB
    return whole if rounded >= 10 * MIB and whole - rounded <= MIB else rounded


class LiveBytes:
    """The live bytes of one kind of device, their peak, and what each owner had of them then."""

    def __init__(self, unit: Any = int):
        self.unit = unit
        self.live: Counter[str] = Counter()
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}

    def add(self, owner: str, size: int) -> None:
        self.live[owner] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, {name: held for name, held in self.live.items() if held}

    def begin_phase(self) -> None:
        """Forget the peak so far."""
        self.peak, self.at_peak = self.total, {name: held for name, held in self.live.items() if held}


class Tally:
    """Every storage that was made since the tally was opened. `owner` names the owner of those made in a region of
    code."""

    def __init__(self) -> None:
        self.holders: dict[str, LiveBytes] = {}
        self.known: dict[int, tuple[Any, str, str, int]] = {}  # storage -> weak reference, device type, owner, bytes
        self.owners = [SCRATCH]

    def of(self, kind: str) -> LiveBytes:
        if kind not in self.holders:
            self.holders[kind] = LiveBytes(block_bytes if kind == "cuda" else int)
        return self.holders[kind]

    @contextmanager
    def owner(self, name: str) -> Iterator[None]:
        self.owners.append(name)
        try:
            yield
        finally:
            self.owners.pop()

    def see(self, tensor: torch.Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key not in self.known:
            holder, owner = self.of(kind), self.owners[-1]
            size = holder.unit(storage.nbytes()) if owner != MAPPED else 0
            gone = weakref.ref(storage, lambda _: self._gone(key))
            self.known[key] = (gone, kind, owner, size)
            holder.add(owner, size)

    def kind_of(self, tensor: torch.Tensor) -> str | None:
        """The kind of device that a tensor's storage was entered for; None if it was not."""
        known = self.known.get(storage_id(tensor.untyped_storage()))
        return None if known is None else known[1]

    def give(self, owner: str, *tensors: torch.Tensor | None) -> None:
        """Change the owner of these tensors; one that was not made while counting is passed over."""
        for tensor in tensors:
            key = -1 if tensor is None else storage_id(tensor.untyped_storage())
            if key in self.known:
                reference, kind, before, size = self.known[key]
                self.known[key] = (reference, kind, owner, size)
                live = self.of(kind).live
                live[before] -= size
                live[owner] += size

    def _gone(self, key: int) -> None:
        _, kind, owner, size = self.known.pop(key)
        self.of(kind).add(owner, -size)


def bare(mode: Any) -> Any:
    """Remove the wrapper that torch puts around a mode's method for its compiler: it would import the compiler, which
    takes three seconds and 100 MiB."""
    inner = vars(mode)["__torch_dispatch__"]
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    mode.__torch_dispatch__ = inner
    return mode
