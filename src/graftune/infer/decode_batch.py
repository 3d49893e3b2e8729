"""The sequences that are being continued, on the device: one place each, and one round that gives every place its next
token. The round draws the token, notices stop tokens and the last length, and feeds the token to the next round, so
that the host has nothing to do between two rounds. On CUDA it is captured in a graph for each of a few numbers of
places, because launching its kernels one by one would be host-bound.

What a round has drawn goes to the next line of a block; the host reads a block of several rounds at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from graftune import graph
from graftune.infer import cache as caches
from graftune.infer.cache import Cache, Decode, Prefill
from graftune.infer.sample import Sampling
from graftune.kernels import draw, launch
from graftune.model.decoder import Decoder

ROUNDS = 8  # of a block at most
STOPS = 64  # stop tokens at most


class Piece(NamedTuple):
    """Some tokens of a prompt that are read in one pass."""

    slot: int
    start: int
    tokens: Sequence[int]
    final: int


class DrawnRounds(NamedTuple):
    """Rounds on their way to the host."""

    drawn: torch.Tensor  # [rounds, 3, size]: token (-1 if the place had ended), logprob, sampling_logprob; on the host
    arrived: Any  # event


class DecodeBatch:
    def __init__(self, decoder: Decoder, cache: Cache, backend: str):
        self.decoder, self.cache, self.backend = decoder, cache, backend
        self.device, count = cache.device, cache.shape.places
        numbers = torch.zeros(4, count, dtype=torch.int64, device=self.device)
        self.numbers = numbers
        self.tokens, self.lengths, self.finals, self.samples = numbers  # the next to read; how many are in the cache
        self.live = torch.zeros(count, dtype=torch.bool, device=self.device)
        self.stops = torch.full((STOPS,), -1, dtype=torch.int64, device=self.device)
        self.settings = draw.DrawSettings.of(1.0, 0, 1.0, 0, self.device)
        self.block = torch.zeros(ROUNDS, 3, count, dtype=torch.float64, device=self.device)
        self.line = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.mode, self.adapted, self.bound = draw.GREEDY, True, 0
        # Whether rounds are captured, with a few sizes, and queued ahead of the host.
        self.ahead = self.device.type == "cuda"
        powers = [1 << i for i in range(count.bit_length())]
        self.sizes = sorted({size for size in powers if size < count} | {count})

    def size_for(self, sequences: int) -> int:
        """How many places a round computes; without graphs no more than there are sequences."""
        return next(size for size in self.sizes if size >= sequences) if self.ahead else sequences

    def begin(self, sampling: Sampling, stops: Sequence[int], adapted: bool) -> None:
        """Set the sampling settings of the following rounds."""
        self.mode, self.adapted = sampling.mode, adapted
        self.settings.fill_(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)
        self.stops.copy_(launch.uploaded([*stops, *[-1] * (STOPS - len(stops))], self.device))
        self.live.zero_()

    def start(self, places: Sequence[int], numbers: Sequence[tuple[int, int, int, int]]) -> None:
        """Start sequences; `numbers` of each: next token to read, tokens in the cache, final length, sample number."""
        at = launch.uploaded(places, self.device)
        flat = [number for kind in zip(*numbers, strict=True) for number in kind]
        self.numbers.index_copy_(1, at, launch.uploaded(flat, self.device).view(4, -1))
        self.live.index_fill_(0, at, True)

    def end(self, place: int) -> None:
        self.live[place : place + 1].zero_()

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Move sequences between places: pairs of (from, to)."""
        source, target = launch.uploaded([one[side] for side in (0, 1) for one in pairs], self.device).view(2, -1)
        self.numbers.index_copy_(1, target, self.numbers.index_select(1, source))
        self.live.index_copy_(0, target, self.live.index_select(0, source))
        self.live.index_fill_(0, source, False)
        for table in self.cache.tables.values():
            table.index_copy_(0, target, table.index_select(0, source))
        self.cache.copy_(pairs, {})

    @torch.no_grad()
    def read(self, pieces: Sequence[Piece]) -> None:
        """Run a pass over pieces of prompts, of which none or all have earlier tokens in the cache."""
        lengths, last = [len(piece.tokens) for piece in pieces], sum(len(piece.tokens) for piece in pieces) - 1
        slots, starts, finals = zip(*((piece.slot, piece.start, piece.final) for piece in pieces), strict=True)
        pass_ = Prefill(self.cache, slots, starts, lengths, finals, self.backend)
        tokens = launch.uploaded([token for piece in pieces for token in piece.tokens], self.device)
        ctx = self.decoder.begin(pass_.positions, pass_, adapted=self.adapted)
        self.decoder.hidden(tokens, ctx, launch.uploaded([last], self.device))  # only the cache is of interest
        self.decoder.bundles.restore_first_blocks()

    def rounds(self, replay: Callable[[], None], count: int, size: int) -> DrawnRounds:
        """Queue `count` rounds over the first `size` places, and the copy of their tokens to the host. `replay` runs
        `round`."""
        self.line.zero_()
        self.decoder.bundles.restore_first_blocks()  # training or evaluation may have run since the last round
        for _ in range(count):
            replay()
        fresh, event = self.block[:count, :, :size], graph.event(self.device)
        drawn = torch.empty(fresh.shape, dtype=fresh.dtype, pin_memory=self.device.type == "cuda")
        drawn.copy_(fresh, non_blocking=True)
        event.record(graph.current_stream(self.device))
        return DrawnRounds(drawn, event)

    @torch.no_grad()
    def round(self, size: int, mode: str, adapted: bool) -> None:
        """Draw the next token of the first `size` places. Kernels do not read `bound`, so any value can be captured."""
        decoder, live = self.decoder, self.live[:size]
        tokens, lengths, finals, samples = self.numbers[:, :size]
        at = torch.where(live, lengths, 0)
        x = decoder.hidden(tokens, decoder.begin(at, Decode(self.cache, at, live, finals, self.bound), adapted=adapted))
        drawn = draw.draw(decoder.logits(x, adapted=adapted), mode, self.settings, samples, at + 1)
        figures = torch.stack([torch.where(live, drawn.tokens, -1).double(), *(f.double() for f in drawn[1:])])
        self.block[:, :, :size].index_copy_(0, self.line, figures.unsqueeze(0))
        self.line.add_(1)
        tokens.copy_(drawn.tokens)
        lengths.add_(live)
        ended = (drawn.tokens.unsqueeze(1) == self.stops).any(1) | (lengths + 1 >= finals)
        live.copy_(live & ~ended)


def passes(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Cut prompts into pieces and pack these into passes: first the beginnings of all prompts, then the rest."""
    first, later = list[Piece](), list[Piece]()
    for piece in pieces:
        for start in range(0, len(piece.tokens), caches.CHUNK):
            cut = piece._replace(start=start, tokens=piece.tokens[start : start + caches.CHUNK])
            (later if start else first).append(cut)
    found: list[list[Piece]] = []
    for some in (first, later):
        taken, slots = caches.PASS_TOKENS + 1, set[int]()
        for piece in some:
            taken += len(piece.tokens)
            if taken > caches.PASS_TOKENS or piece.slot in slots:  # a prompt's own pieces come one after the other
                found.append([])
                taken, slots = len(piece.tokens), set()
            found[-1].append(piece)
            slots.add(piece.slot)
    return found
