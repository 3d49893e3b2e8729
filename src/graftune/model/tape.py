"""What the forward keeps for the backward, by policy.

    none        all that a half's backward wants: nothing but norms, rope and SwiGLU is computed twice
    selective   not the gate_up product, 60% of the whole: one product of eight is computed twice
    full        only each block's input: the block's forward is computed twice, but for its last product
    offload     as full, and the inputs wait in pinned host memory; copies run on a stream of their own, an input ahead

The tape is explicit instead of autograd's: it says what is kept, lets go of it as soon as it is used, and is the one
place where a policy lives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from graftune import graph
from graftune.model.block import Attended, Block, Mlped, attention_half, gate_up_again, mlp_half_again
from graftune.model.run import Pass


class Tape(Protocol):
    def keep(self, block: Block, attended: Attended, mlped: Mlped) -> None: ...
    def take(self, block: Block, run: Pass, rows: torch.Tensor | None) -> tuple[Attended, Mlped]:
        """What was kept of a block, complete again; blocks are taken in reverse order, each once."""
        ...


@dataclass
class Everything:
    kept: list[tuple[Attended, Mlped]] = field(default_factory=list)

    def keep(self, block: Block, attended: Attended, mlped: Mlped) -> None:
        self.kept.append((attended, mlped))

    def take(self, block: Block, run: Pass, rows: torch.Tensor | None) -> tuple[Attended, Mlped]:
        return self.kept.pop()


class Selective(Everything):
    def keep(self, block: Block, attended: Attended, mlped: Mlped) -> None:
        super().keep(block, attended, mlped._replace(gate_up=mlped.x.new_empty(0)))

    def take(self, block: Block, run: Pass, rows: torch.Tensor | None) -> tuple[Attended, Mlped]:
        attended, mlped = self.kept.pop()
        return attended, gate_up_again(block, mlped, run)


@dataclass
class Inputs:
    """`full`: a block's forward is made again from its input."""

    kept: list[torch.Tensor] = field(default_factory=list)

    def keep(self, block: Block, attended: Attended, mlped: Mlped) -> None:
        self.kept.append(attended.x)

    def take(self, block: Block, run: Pass, rows: torch.Tensor | None) -> tuple[Attended, Mlped]:
        return again(block, self.kept.pop(), run, rows)


def again(block: Block, x: torch.Tensor, run: Pass, rows: torch.Tensor | None) -> tuple[Attended, Mlped]:
    x, y, attended = attention_half(block, x, None, run)
    if rows is not None:
        x, y = x.index_select(0, rows), y.index_select(0, rows)
    return attended, mlp_half_again(block, x, y, run)


class Offloaded:
    """`offload`: inputs go to pinned memory and come back one block before they are needed.

    A tensor that a copy still reads is held until the main stream has waited for that copy: the allocator may then
    hand its memory to anybody."""

    def __init__(self, homes: list[torch.Tensor]):
        self.homes = homes  # pinned, one a block
        self.side = graph.stream("offload")
        self.leaving: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self.coming: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}

    def keep(self, block: Block, attended: Attended, mlped: Mlped) -> None:
        main = torch.cuda.current_stream()
        self._let_go(1)
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            self.homes[block.index].copy_(attended.x, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self.side)
        self.leaving.append((attended.x, done))

    def take(self, block: Block, run: Pass, rows: torch.Tensor | None) -> tuple[Attended, Mlped]:
        self._let_go(0)
        if block.index not in self.coming:
            self._fetch(block.index, run)
        x, arrived = self.coming.pop(block.index)
        torch.cuda.current_stream().wait_event(arrived)
        if block.index:
            self._fetch(block.index - 1, run)
        return again(block, x, run, rows)

    def _fetch(self, index: int, run: Pass) -> None:
        x = torch.empty(self.homes[index].shape, dtype=self.homes[index].dtype, device=run.tables[0][0].device)
        self.side.wait_stream(torch.cuda.current_stream())  # x's memory may still be read by what came before
        with torch.cuda.stream(self.side):
            x.copy_(self.homes[index], non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self.side)
        self.coming[index] = (x, arrived)

    def _let_go(self, left: int) -> None:
        while len(self.leaving) > left:
            _, done = self.leaving[0]
            torch.cuda.current_stream().wait_event(done)
            self.leaving.pop(0)


@dataclass
class Tapes:
    """Makes a tape for every pass; `offload`'s pinned memory is taken once a shape, and kept: graphs copy into it."""

    policy: str = "none"
    homes: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    def new(self, blocks: int, tokens: int, width: int, dtype: torch.dtype) -> Tape:
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
        return Offloaded(self.homes[tokens, width])
