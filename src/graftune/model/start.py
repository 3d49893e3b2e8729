"""A snapshot of the trained weights at the start of the run: the reference of a loss that continues an adapter.

Held are two flat fp32 buffers beside the arena's: the values of the start, and a place for today's while a forward pass
reads the start's. Products read views into the arena and copies of it beside the weights, whose addresses a captured
step has fixed; so values are exchanged, not addresses: four copies of the arena and two of what is published of it, a
hundredth of a forward pass. Rejected: a second set of adapters in every projection, which all kinds of weights, their
kernels and the plan would have to know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from graftune.model.arena import Arena


class Start:
    def __init__(self, arena: Arena):
        self.arena = arena
        self.values, self.aside = torch.zeros_like(arena.weights), torch.zeros_like(arena.weights)

    def take(self) -> None:
        self.values.copy_(self.arena.weights)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Passes inside the context use the values of the start. No update may run in between."""
        self.aside.copy_(self.arena.weights)
        self._set(self.values)
        try:
            yield
        finally:
            self._set(self.aside)

    def _set(self, values: torch.Tensor) -> None:
        self.arena.weights.copy_(values)
        self.arena.publish()
