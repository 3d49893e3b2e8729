"""Everything that trains, in one flat fp32 buffer.

Adapters, and on request norm weights and the rows of added tokens, are views into `Arena.weights`; their gradients and
AdamW's moments are buffers of the same layout, and `Arena.compute` is the copy in the compute dtype that products read.
Norm, clip, update, zero and checkpoint are then one operation each, however many tensors there are. A list of
parameters, the usual way, costs a launch per tensor for every one of these.

model/lora.py makes the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from graftune.arithmetic import ceil_div
from graftune.kernels import lora_linear
from graftune.kernels.augmented_weight import Adapters
from graftune.kernels.lora_linear import Copy, LowRank
from graftune.model.frozen.interface import Augmented

TAIL = 64  # numbers after the gradients for the sums of a step


@dataclass(frozen=True)
class Slot:
    """One trainable tensor: its name as PEFT writes it (without the model's prefix), its place and its layer."""

    name: str
    shape: tuple[int, ...]
    start: int
    layer: int  # -1: belongs to no layer
    decay: bool

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class LoraGroup:
    """Adapters of projections with one input: their A's and B's stacked, as views into the arena."""

    adapters: Adapters
    grad_down: torch.Tensor  # fp32
    grad_up: torch.Tensor  # fp32
    arena: Arena = field(repr=False, compare=False)
    diagonal: torch.Tensor | None = None  # the B's on the diagonal of one matrix, where that is faster

    def low(self, h: torch.Tensor) -> LowRank:
        return LowRank(h, self.adapters.up, self.adapters.columns, self.adapters.scale, self.diagonal)

    def place_adapters(self, weight: Augmented) -> None:
        """Keep copies of A in the rows below the weight and of s B in the columns beside it, for its products."""
        self.arena.copies += weight.place_adapters(self.adapters)


@dataclass
class Arena:
    slots: dict[str, Slot]
    device: torch.device
    compute_dtype: torch.dtype
    weights: torch.Tensor = field(init=False)
    grads: torch.Tensor = field(init=False)
    sums: torch.Tensor = field(init=False)  # the gradients, followed by TAIL numbers that are summed with them
    m: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)
    compute: torch.Tensor = field(init=False)
    copies: list[Copy] = field(default_factory=list)
    # Called when `publish` has copied the weights: FP8 then computes its adapter codes.
    followers: list[Callable[[], None]] = field(default_factory=list)
    own_bytes: int = 0  # of tensors beside the flat buffers

    def __post_init__(self) -> None:
        size = max((slot.stop for slot in self.slots.values()), default=0)
        self.weights, self.m, self.v = (torch.zeros(size, dtype=torch.float32, device=self.device) for _ in range(3))
        self.sums = torch.zeros(ceil_div(size, TAIL) * TAIL + TAIL, dtype=torch.float32, device=self.device)
        self.grads = self.sums[:size]
        self._tables: dict[str, torch.Tensor] = {}
        same = self.compute_dtype == torch.float32
        self.compute = self.weights if same else torch.zeros(size, dtype=self.compute_dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        own = 0 if self.compute is self.weights else self.compute.nbytes
        return 3 * self.weights.nbytes + self.sums.nbytes + own + self.own_bytes

    @property
    def tail(self) -> torch.Tensor:
        return self.sums[-TAIL:]

    @property
    def full(self) -> bool:
        return "embed_tokens.weight" in self.slots

    def span(self, first: str, last: str) -> slice:
        """The range of the flat buffers from slot `first` to slot `last`."""
        return slice(self.slots[first].start, self.slots[last].stop)

    def view(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        slot = self.slots[name]
        return buffer[slot.start : slot.stop].view(slot.shape)

    def publish(self, cast: bool = True) -> None:
        """Update the copies that products read after the weights have changed (`cast`: the flat copy too)."""
        if cast and self.compute is not self.weights:
            self.compute.copy_(self.weights)
        lora_linear.spread(self.copies, self._tables)
        for follow in self.followers:
            follow()

    @property
    def decayed(self) -> int:
        """Slots before this index decay, those from it on do not."""
        return max((slot.stop for slot in self.slots.values() if slot.decay), default=0)

    def segments(self, mode: str) -> list[list[slice]]:
        """The slices that are clipped together: everything, or each layer (slots without a layer are one segment)."""
        if mode == "global":
            return [[slice(0, len(self.weights))]]
        runs: dict[int, list[slice]] = {}
        for slot in self.slots.values():
            run = runs.setdefault(slot.layer, [])
            if run and run[-1].stop == slot.start:
                run[-1] = slice(run[-1].start, slot.stop)
            else:
                run.append(slice(slot.start, slot.stop))
        return list(runs.values())


class Start:
    """A snapshot of the trained weights at the start of the run: the reference of a loss that continues an adapter.

    It holds two flat fp32 buffers beside the arena's: the values of the start, and the current ones while a forward
    pass reads the start's. Products read views into the arena and copies of it beside the weights, whose addresses a
    captured step has fixed; so values are exchanged, not addresses: that takes four copies of the arena and two calls
    of `publish`, a hundredth of a forward pass. Rejected: a second set of adapters in every projection, which all
    kinds of weights, their kernels and the plan would have to support."""

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
