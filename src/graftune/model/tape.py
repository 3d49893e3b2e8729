"""What the forward saves for the backward, by policy.

    none        all that the parts' backward needs: only norms and gated units are computed twice
    selective   without what each part marks as large and cheap to recompute: in a gated MLP that is the gate_up product
                (60% of a block's saved bytes, one of its four forward products), in a delta net the delta rule
    full        only each block's input: the block's forward is computed twice, except for its last product
    offload     as full, and the inputs wait in pinned host memory; copies run on a stream of their own, one block ahead

The tape is explicit instead of autograd's: it states what is kept, releases it as soon as it is used, and is the only
place that depends on the policy. It calls the branches of a block and contains no code for a kind of part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from graftune import graph
from graftune.kernels import rehearsal
from graftune.kernels.rehearsal import SAVED
from graftune.model.block import Block
from graftune.model.context import PassContext

T = TypeVar("T")


class Tape(Protocol):
    @property
    def inputs_only(self) -> bool:
        """Whether it keeps nothing but the inputs of blocks."""

    def keep(self, block: Block, saved: list[Any]) -> None:
        """Take what each branch of a block has saved."""

    def take(self, block: Block, ctx: PassContext, rows: torch.Tensor | None) -> list[Any]:
        """What the branches saved, complete again. Blocks are taken in reverse order, each once."""


def _reported(held: T) -> T:
    """Tells the memory plan that these are saved activations."""
    rehearsal.assign(SAVED, held)
    return held


@dataclass
class SaveAll:
    kept: list[list[Any]] = field(default_factory=list)
    inputs_only = False

    def keep(self, block: Block, saved: list[Any]) -> None:
        self.kept.append(_reported(saved))

    def take(self, block: Block, ctx: PassContext, rows: torch.Tensor | None) -> list[Any]:
        return self.kept.pop()


class DropRecomputable(SaveAll):
    """The tape of the policy `selective`."""

    def keep(self, block: Block, saved: list[Any]) -> None:
        super().keep(block, block.drop_recomputable(saved))

    def take(self, block: Block, ctx: PassContext, rows: torch.Tensor | None) -> list[Any]:
        return block.recompute_dropped(self.kept.pop(), ctx, rows)


@dataclass
class SaveBlockInputs:
    """The tape of the policy `full`."""

    kept: list[torch.Tensor] = field(default_factory=list)
    inputs_only = True

    def keep(self, block: Block, saved: list[Any]) -> None:
        self.kept.append(_reported(saved[0].x))

    def take(self, block: Block, ctx: PassContext, rows: torch.Tensor | None) -> list[Any]:
        return block.recompute(self.kept.pop(), ctx, rows)


class OffloadBlockInputs:
    """`offload`: inputs go to pinned memory and come back one block before they are needed.

    A tensor that a copy still reads is held until the main stream has waited for that copy: only then may the allocator
    reuse its memory."""

    inputs_only = True

    def __init__(self, pinned: list[torch.Tensor], device: torch.device):
        self.pinned, self.device = pinned, device  # one host tensor for each block
        self.side = graph.stream("offload", device)
        self.leaving: list[tuple[torch.Tensor, Any]] = []
        self.coming: dict[int, tuple[torch.Tensor, Any]] = {}

    def keep(self, block: Block, saved: list[Any]) -> None:
        x, main = saved[0].x, graph.current_stream(self.device)
        self._release(1)
        self.side.wait_stream(main)
        with graph.on(self.side, "keeping inputs on the host"):
            self.pinned[block.index].copy_(x, non_blocking=True)
            done = graph.event(self.device)
            done.record(self.side)
        self.leaving.append((x, done))

    def take(self, block: Block, ctx: PassContext, rows: torch.Tensor | None) -> list[Any]:
        self._release(0)
        if block.index not in self.coming:
            self._fetch(block.index)
        x, arrived = self.coming.pop(block.index)
        graph.wait(self.device, arrived, operation="wait for inputs")
        if block.index:
            self._fetch(block.index - 1)
        return block.recompute(x, ctx, rows)

    def _fetch(self, index: int) -> None:
        pinned = self.pinned[index]
        x = torch.empty(pinned.shape, dtype=pinned.dtype, device=self.device)
        self.side.wait_stream(graph.current_stream(self.device))  # earlier work may still read x's memory
        with graph.on(self.side, "fetching inputs"):
            x.copy_(pinned, non_blocking=True)
            arrived = graph.event(self.device)
            arrived.record(self.side)
        self.coming[index] = (x, arrived)

    def _release(self, left: int) -> None:
        """Wait for the oldest copies, until so many are left, and drop the tensors that they read."""
        while len(self.leaving) > left:
            _, done = self.leaving[0]
            graph.current_stream(self.device).wait_event(done)
            self.leaving.pop(0)


@dataclass
class Tapes:
    """Makes a tape for every pass. Pinned memory of `offload` is allocated once for each shape and stays: captured
    graphs copy into it."""

    policy: str = "none"
    pinned: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    def new(self, blocks: int, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Tape:
        if self.policy == "none":
            return SaveAll()
        if self.policy == "selective":
            return DropRecomputable()
        if self.policy == "full":
            return SaveBlockInputs()
        assert self.policy == "offload", self.policy
        if (tokens, width) not in self.pinned:
            made = [torch.empty(tokens, width, dtype=dtype, pin_memory=True) for _ in range(blocks)]
            self.pinned[tokens, width] = made
        return OffloadBlockInputs(self.pinned[tokens, width], device)
