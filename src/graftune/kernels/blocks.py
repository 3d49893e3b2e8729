"""Divides the flat arena into blocks, over which the norm and the update are launched.

A block is part of one span, so all its elements have the same clip factor and weight decay, and a single launch serves
any number of layers, tensors and settings. Blocks start at multiples of the block size in the arena, not in the span:
every whole block then has an aligned address, where loads are 16 bytes wide without a mask, and only the ends of a span
are masked. The table is made once at the start, on the host; launches read it from the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from graftune.arithmetic import ceil_div

LEAST_BLOCK, WIDE_BLOCK = 1024, 8192
MANY_BLOCKS, MOST_BLOCKS = 1 << 14, 100_000  # enough to keep a GPU busy; as many as one program can sum quickly
PIECE = 1 << 20  # elements that the references compute at a time, so that their temporaries stay small


class ArenaSpan(NamedTuple):
    """A range of the arena with one clip factor and one weight decay."""

    start: int
    stop: int
    segment: int
    decay: bool


def arena_spans(segments: Sequence[Sequence[slice]], decayed: int) -> list[ArenaSpan]:
    """The spans of segments (each some slices of the arena); elements before `decayed` have weight decay."""
    spans = []
    for index, segment in enumerate(segments):
        for part in segment:
            edge = min(max(decayed, part.start), part.stop)
            spans += [ArenaSpan(part.start, edge, index, True), ArenaSpan(edge, part.stop, index, False)]
    return [span for span in spans if span.start < span.stop]


def block_size(elements: int) -> int:
    """A power of two: small for a small arena, so that every multiprocessor has blocks, and large for a large one, to
    limit the fixed cost of a block."""
    enough = min(max(LEAST_BLOCK, elements // MANY_BLOCKS), WIDE_BLOCK)
    return 1 << (max(enough, ceil_div(elements, MOST_BLOCKS)) - 1).bit_length()


@dataclass(frozen=True)
class BlockTable:
    """Blocks in the order of their segments: block b is elements starts[b] to stops[b] of the arena."""

    spans: tuple[ArenaSpan, ...]  # sorted by segment, then start
    segments: int
    block: int  # elements of a whole block
    longest: int  # the largest number of blocks in a segment
    starts: torch.Tensor  # [blocks] int64
    stops: torch.Tensor  # [blocks] int64
    segment: torch.Tensor  # [blocks] int32
    decay: torch.Tensor  # [blocks] fp32, 1 or 0
    first: torch.Tensor  # [segments + 1] int32: segment s has the blocks first[s] to first[s + 1]

    def __len__(self) -> int:
        return len(self.starts)

    @classmethod
    def of(
        cls, spans: Iterable[ArenaSpan], *, block: int | None = None, device: torch.device | str = "cpu"
    ) -> BlockTable:
        ordered = tuple(sorted((span for span in spans if span.start < span.stop), key=lambda s: (s.segment, s.start)))
        places = sorted((span.start, span.stop) for span in ordered)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(places)), "spans overlap"
        block = block or block_size(sum(span.stop - span.start for span in ordered))
        assert block >= 16 and block & (block - 1) == 0, "a block is a power of two"
        segments = max((span.segment for span in ordered), default=0) + 1

        starts, stops = [], []
        for span in ordered:
            tiles = torch.arange(span.start // block * block, span.stop, block, dtype=torch.int64)
            starts.append(tiles.clamp(min=span.start))
            stops.append((tiles + block).clamp(max=span.stop))
        lengths = torch.tensor([len(part) for part in starts], dtype=torch.int64)
        segment = torch.tensor([span.segment for span in ordered], dtype=torch.int32).repeat_interleave(lengths)
        decay = torch.tensor([float(span.decay) for span in ordered]).repeat_interleave(lengths)
        counts = torch.bincount(segment.long(), minlength=segments)
        first = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).to(torch.int32)
        empty = [torch.zeros(0, dtype=torch.int64)]
        return cls(
            ordered,
            segments,
            block,
            int(counts.max()),
            *(x.to(device) for x in (torch.cat(starts or empty), torch.cat(stops or empty), segment, decay, first)),
        )

    def pieces(self) -> list[ArenaSpan]:
        """The spans cut into pieces of at most PIECE elements, for the references."""
        return [
            span._replace(start=at, stop=min(at + PIECE, span.stop))
            for span in self.spans
            for at in range(span.start, span.stop, PIECE)
        ]
