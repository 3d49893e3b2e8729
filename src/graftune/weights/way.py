"""What a way to hold a base is, where it has projections of its own: one interface, so that nobody names the way.

A way says which devices it works on and which options it has (the same weights at different prices in memory and time),
and makes the projections. placement.py lists the ways and chooses among the options, load.py asks for projections, and
the plan gives up memory option by option.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from graftune.model.frozen import RowSource
from graftune.model.lora import LoraGroup
from graftune.model.projection import Projection
from graftune.runtime import Runtime
from graftune.weights.base import Base


class Option(NamedTuple):
    """One price of a way. What is computed is the same under each, bit for bit."""

    name: str = ""  # "": the one that takes the least memory
    why: str = ""  # added to the sentence that says how the weights are held


class Projections(Protocol):
    """Makes the projections of one model."""

    def make(
        self, sources: Sequence[RowSource], adapter_columns: int, lora: LoraGroup | None, place: int, name: str
    ) -> Projection: ...


class Way(Protocol):
    def check(self, runtime: Runtime) -> None:
        """Refuses a device that it does not work on."""
        ...

    def options(self, base: Base, free: int) -> tuple[Option, ...]:
        """Those worth trying with so many bytes free, the best first; the last takes the least memory."""
        ...

    def projections(
        self,
        option: str,
        products: Iterable[tuple[int, int, int]],
        device: torch.device,
        compute: torch.dtype,
        *,
        dropout: float,
        fetched: bool,
    ) -> Projections:
        """`products`: (out, in, adapter columns) of all that the model has. `dropout` is that of the adapters.
        `fetched`: blocks share their memory."""
        ...
