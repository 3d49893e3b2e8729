"""The flat arena cut into blocks: what the norm and the update are launched over.

A block lies inside one span, so all its elements are clipped by one factor and decayed alike, and a single launch
serves any number of layers, tensors and settings. Cuts fall on multiples of the block size within the arena, not
within the span: every whole block then starts on an aligned address, where loads are 16 bytes wide without a mask, and
only the ragged ends of a span are masked. Made once at start, on the host; the launches read it from the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from graftune.arithmetic import ceil_div

LEAST_BLOCK, WIDE_BLOCK = 1024, 8192
MANY_BLOCKS, MOST_BLOCKS = 1 << 14, 100_000  # enough to keep a GPU busy; what one program still adds up quickly
PIECE = 1 << 20  # what the references take at a time: their temporaries stay small, their values are the same


class ArenaSpan(NamedTuple):
    """A run of the arena that is clipped and decayed alike."""

    start: int
    stop: int
    segment: int
    decay: bool


def spans_of(segments: Sequence[Sequence[slice]], decayed: int) -> list[ArenaSpan]:
    """The spans of segments (each some slices of the arena) where elements before `decayed` decay, the rest do not."""
    spans = []
    for index, segment in enumerate(segments):
        for part in segment:
            edge = min(max(decayed, part.start), part.stop)
            spans += [ArenaSpan(part.start, edge, index, True), ArenaSpan(edge, part.stop, index, False)]
    return [span for span in spans if span.start < span.stop]


def block_size(elements: int) -> int:
    """A power of two: small in a small arena, so that there are blocks for every multiprocessor, and wide in a large
    one, where a block's start and end cost more than they gain."""
    enough = min(max(LEAST_BLOCK, elements // MANY_BLOCKS), WIDE_BLOCK)
    return 1 << (max(enough, ceil_div(elements, MOST_BLOCKS)) - 1).bit_length()


@dataclass(frozen=True)
class BlockTable:
    """Blocks in order of their segments: block b is elements starts[b] to stops[b] of the arena."""

    spans: tuple[ArenaSpan, ...]  # by segment, then place
    segments: int
    block: int  # elements of a whole block
    longest: int  # blocks of the segment that has most
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
        """The spans again, none longer than PIECE: what a reference loops over."""
        return [
            span._replace(start=at, stop=min(at + PIECE, span.stop))
            for span in self.spans
            for at in range(span.start, span.stop, PIECE)
        ]
