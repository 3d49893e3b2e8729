"""What the forward keeps for the backward, by policy.

    none        all that the parts' backward wants: nothing but norms, rope and gated units is computed twice
    selective   not what the parts call large and cheap to make again: of attention and a gated MLP the gate_up product,
                60% of the whole, so that one product of eight is computed twice
    full        only each block's input: the block's forward is computed twice, but for its last product
    offload     as full, and the inputs wait in pinned host memory; copies run on a stream of their own, an input ahead

The tape is explicit instead of autograd's: it says what is kept, lets go of it as soon as it is used, and is the one
place where a policy lives. It asks the parts of a block and knows no kind of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from graftune import graph
from graftune.kernels import rehearsal
from graftune.kernels.rehearsal import SAVED
from graftune.model.block import Block, BranchSaved
from graftune.model.context import PassContext


class Tape(Protocol):
    def keep(self, block: Block, mixed: BranchSaved, fed: BranchSaved) -> None: ...
    def take(self, block: Block, ctx: PassContext, rows: torch.Tensor | None) -> tuple[BranchSaved, BranchSaved]:
        """What was kept of a block, complete again; blocks are taken in reverse order, each once."""
        ...


@dataclass
class Everything:
    kept: list[tuple[BranchSaved, BranchSaved]] = field(default_factory=list)

    def keep(self, block: Block, mixed: BranchSaved, fed: BranchSaved) -> None:
        self.kept.append((mixed, fed))
        rehearsal.give(SAVED, mixed, fed)

    def take(self, block: Block, ctx: PassContext, rows: torch.Tensor | None) -> tuple[BranchSaved, BranchSaved]:
        return self.kept.pop()


class Selective(Everything):
    def keep(self, block: Block, mixed: BranchSaved, fed: BranchSaved) -> None:
        super().keep(block, block.mixing.light(mixed), block.feeding.light(fed))

    def take(self, block: Block, ctx: PassContext, rows: torch.Tensor | None) -> tuple[BranchSaved, BranchSaved]:
        mixed, fed = self.kept.pop()
        return block.mixing.complete(mixed, ctx), block.feeding.complete(fed, ctx)


@dataclass
class Inputs:
    """`full`: a block's forward is made again from its input."""

    kept: list[torch.Tensor] = field(default_factory=list)

    def keep(self, block: Block, mixed: BranchSaved, fed: BranchSaved) -> None:
        self.kept.append(mixed.x)
        rehearsal.give(SAVED, mixed.x)

    def take(self, block: Block, ctx: PassContext, rows: torch.Tensor | None) -> tuple[BranchSaved, BranchSaved]:
        return block.again(self.kept.pop(), ctx, rows)


class Offloaded:
    """`offload`: inputs go to pinned memory and come back one block before they are needed.

    A tensor that a copy still reads is held until the main stream has waited for that copy: the allocator may then
    hand its memory to anybody."""

    def __init__(self, homes: list[torch.Tensor], device: torch.device):
        self.homes, self.device = homes, device  # the homes are pinned, one a block
        self.side = graph.stream("offload", device)
        self.leaving: list[tuple[torch.Tensor, Any]] = []
        self.coming: dict[int, tuple[torch.Tensor, Any]] = {}

    def keep(self, block: Block, mixed: BranchSaved, fed: BranchSaved) -> None:
        main = graph.current_stream(self.device)
        self._let_go(1)
        self.side.wait_stream(main)
        with graph.on(self.side, "keeping inputs on the host"):
            self.homes[block.index].copy_(mixed.x, non_blocking=True)
            done = graph.event(self.device)
            done.record(self.side)
        self.leaving.append((mixed.x, done))

    def take(self, block: Block, ctx: PassContext, rows: torch.Tensor | None) -> tuple[BranchSaved, BranchSaved]:
        self._let_go(0)
        if block.index not in self.coming:
            self._fetch(block.index)
        x, arrived = self.coming.pop(block.index)
        graph.wait(self.device, arrived, operation="wait for inputs")
        if block.index:
            self._fetch(block.index - 1)
        return block.again(x, ctx, rows)

    def _fetch(self, index: int) -> None:
        x = torch.empty(self.homes[index].shape, dtype=self.homes[index].dtype, device=self.device)
        self.side.wait_stream(graph.current_stream(self.device))  # x's memory may still be read by what came before
        with graph.on(self.side, "fetching inputs"):
            x.copy_(self.homes[index], non_blocking=True)
            arrived = graph.event(self.device)
            arrived.record(self.side)
        self.coming[index] = (x, arrived)

    def _let_go(self, left: int) -> None:
        while len(self.leaving) > left:
            _, done = self.leaving[0]
            graph.current_stream(self.device).wait_event(done)
            self.leaving.pop(0)


@dataclass
class Tapes:
    """Makes a tape for every pass; `offload`'s pinned memory is taken once a shape, and kept: graphs copy into it."""

    policy: str = "none"
    homes: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    def new(self, blocks: int, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Tape:
        if self.policy == "none":
            return Everything()
        if self.policy == "selective":
            return Selective()
        if self.policy == "full":
            return Inputs()
        assert self.policy == "offload", self.policy
        if (tokens, width) not in self.homes:
            pinned = [torch.empty(tokens, width, dtype=dtype, pin_memory=True) for _ in range(blocks)]
            self.homes[tokens, width] = pinned
        return Offloaded(self.homes[tokens, width], device)
