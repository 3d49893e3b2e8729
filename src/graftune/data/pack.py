"""Examples -> steps -> micro-batches -> packed tensors.

`plan_epoch` decides on the host which examples go into which step and micro-batch, from their lengths alone, so a
run's shapes are known before its first step and a resumed run finds its place by counting. A step holds at most
`tokens_per_step` tokens in as few micro-batches as that takes: first-fit, and an example
that fits in none of them waits, at most `LOOK_AHEAD` of them, and goes first in the next step. Sorting by length would
pack tighter, but every step would then hold examples of one length only. Examples of one group (the two answers of a
preference pair) are placed as if they were one: they stay together, in their order.

`pack` lays one bin's examples end to end. A row is a position whose hidden state predicts a trained token: the
position before it, in the same document. Only those rows reach the LM head. What a loss asks for beside the labels is
packed as its layout says. A captured step wants the same shapes every time: `capacities` says which hold all bins of a
plan.

Several ranks divide the bins of one plan (`divided`): as many for each, of about the same cost, and where they do not
come out even some ranks get a bin without examples, whose batch is padding alone and adds nothing to loss or gradients.
What is in a bin and which number it has in its step depends on no rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from operator import gt, sub
from typing import NamedTuple

import numpy as np
import torch

from graftune.arithmetic import ceil_div, power_of_two
from graftune.batch import PLAIN, BatchLayout, Example, PackedBatch
from graftune.data.encoded import flat, lengths_of, responses_of, take
from graftune.ranks import Share

LOOK_AHEAD = 64
ATTENTION_COST = 49152.0  # tokens of a document at which attention costs as much as all products, at a width of 4096
TILE = 64  # fixed shapes are multiples of this: the sides that products and attention are cut into


class Capacities(NamedTuple):
    """The fixed shape of a micro-batch."""

    capacity: int  # tokens
    max_docs: int  # the documents that padding makes are among them
    max_rows: int
    longest: int  # tokens of a document

    @property
    def padding_docs(self) -> int:
        """Documents that padding makes at most."""
        return ceil_div(self.capacity, self.longest)

    @property
    def real_docs(self) -> int:
        """Documents that a micro-batch may have however much padding it needs."""
        return self.max_docs - self.padding_docs

    def holds(self, other: Capacities) -> bool:
        """Whether micro-batches of another shape can be packed in this one."""
        sizes = (other.capacity, other.max_docs, other.max_rows, other.longest)
        own = (self.capacity, self.real_docs, self.max_rows, self.longest)
        return all(need <= there for need, there in zip(sizes, own, strict=True))

    def grown(self, other: Capacities, most: int, longest: int) -> Capacities:
        """A shape that holds both, rounded up to powers of two, so that it seldom has to grow again. Rounding up leaves
        micro-batches within `most` tokens; `longest`: a bound on documents to come."""
        least = max(self.capacity, other.capacity)
        capacity = max(least, min(power_of_two(least), whole_tiles(most)))
        bound = min(capacity, whole_tiles(max(self.longest, other.longest, longest)))
        docs = power_of_two(max(self.max_docs, other.max_docs) + ceil_div(capacity, bound))
        return Capacities(capacity, docs, min(capacity, power_of_two(max(self.max_rows, other.max_rows))), bound)


def plan_epoch(
    lengths: Sequence[int] | np.ndarray,
    *,
    tokens_per_step: int,
    micro_capacity: int,
    seed: int,
    epoch: int,
    groups: np.ndarray | None = None,
) -> list[list[list[int]]]:
    """Steps -> micro-batches -> indices into `lengths`; each index once, no micro-batch empty. A step exceeds
    `tokens_per_step` only where a single example (or group) does. `groups`: a number per index; see `groups_of`."""
    bounds = unit_bounds(groups, len(lengths))
    sizes = unit_sums(lengths, bounds)
    assert micro_capacity > 0 and sizes.max(initial=0) <= micro_capacity, "an example exceeds a bin"
    sizes = sizes.tolist()  # single numbers of an array are slow to take
    order = np.random.default_rng([seed, epoch]).permutation(len(sizes)).tolist()
    order.reverse()  # taken from the end
    waiting: list[int] = []
    steps: list[list[list[int]]] = []
    while order or waiting:
        step = _Step(tokens_per_step, micro_capacity)
        waiting = [index for index in waiting if not step.takes(index, sizes[index])]
        while order and len(waiting) < LOOK_AHEAD and step.tokens_left > 0:
            index = order.pop()
            if not step.takes(index, sizes[index]):
                waiting.append(index)
        steps.append([members(bounds, units) for units in step.bins if units])
    return steps


def unit_bounds(groups: np.ndarray | None, count: int) -> list[int]:
    """Where each unit begins, and `count` at the end. A unit is what is placed as one: a run of equal group numbers,
    or, without groups, a single example."""
    if groups is None:
        return list(range(count + 1))
    assert len(groups) == count, "a group number per example"
    return [*np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1)).tolist(), count]


def unit_sums(numbers: Sequence[int] | np.ndarray, bounds: list[int]) -> np.ndarray:
    """The sum of a number per example over each unit."""
    return np.add.reduceat(np.asarray(numbers, np.int64), np.asarray(bounds[:-1], np.int64))


def members(bounds: list[int], units: Sequence[int]) -> list[int]:
    """The indices of the examples of these units."""
    if len(bounds) - 1 == bounds[-1]:  # each unit is one example
        return list(units)
    return [index for unit in units for index in range(bounds[unit], bounds[unit + 1])]


def bounds_of(examples: Sequence[Example], layout: BatchLayout) -> list[int]:
    """The same for the groups that a loss asks for."""
    return unit_bounds(None if layout.groups is None else layout.groups(examples), len(examples))


def largest(examples: Sequence[Example], layout: BatchLayout) -> int:
    """Tokens that a micro-batch has to hold at least: those of the longest example, or of the largest group."""
    return int(unit_sums(lengths_of(examples), bounds_of(examples, layout)).max(initial=0))


def bins_in_order(
    examples: Sequence[Example], capacity: int, layout: BatchLayout, *, docs: float = math.inf, rows: float = math.inf
) -> list[list[int]]:
    """Indices of the examples, in order, as many to a batch as it holds tokens, documents and rows; those of one group
    together. A longer one has a batch of its own."""
    bounds, limits = bounds_of(examples, layout), (capacity, docs, rows)
    needs = [unit_sums(lengths_of(examples), bounds), np.diff(bounds), unit_sums(responses_of(examples), bounds)]
    bins: list[list[int]] = []
    left: list[float] = [0, 0, 0]  # what the last batch can still take
    for unit, need in enumerate(zip(*(each.tolist() for each in needs), strict=True)):
        if any(map(gt, need, left)):
            bins.append([])
            left = list(map(max, limits, need))
        bins[-1] += range(bounds[unit], bounds[unit + 1])
        left = list(map(sub, left, need))
    return bins


def bins_within(examples: Sequence[Example], shape: Capacities, layout: BatchLayout) -> list[list[int]]:
    """The same in batches of a fixed shape."""
    return bins_in_order(examples, shape.capacity, layout, docs=shape.real_docs, rows=shape.max_rows)


def largest_units(examples: Sequence[Example], layout: BatchLayout) -> Capacities:
    """The least that holds every example, or every group, alone. Documents of padding are not counted."""
    alone = [range(*bound) for bound in itertools.pairwise(bounds_of(examples, layout))]
    found = capacities(alone, lengths_of(examples), responses_of(examples))
    return found._replace(max_docs=max(map(len, alone)))


class _Step:
    """The bins of one step while they are filled, and how many more tokens the step takes."""

    def __init__(self, tokens: int, capacity: int):
        count = ceil_div(tokens, capacity)
        self.tokens_left = tokens
        self.free = [capacity] * count
        self.bins: list[list[int]] = [[] for _ in range(count)]

    def takes(self, index: int, length: int) -> bool:
        if length > self.tokens_left and any(self.bins):  # alone, an example may be longer than a step
            return False
        for place, free in enumerate(self.free):
            if length <= free:
                self.bins[place].append(index)
                self.free[place] -= length
                self.tokens_left -= length
                return True
        return False


def capacities(
    bins: Iterable[Sequence[int]], lengths: Sequence[int] | np.ndarray, responses: Sequence[int] | np.ndarray
) -> Capacities:
    """The least that holds every one of these bins of indices, in whole tiles."""
    bins = list(bins)
    assert bins, "there is nothing to hold"
    counts = np.fromiter(map(len, bins), np.int64, len(bins))
    order = np.fromiter(itertools.chain.from_iterable(bins), np.int64, int(counts.sum()))
    starts = np.cumsum(counts) - counts
    tokens = np.add.reduceat(np.asarray(lengths, dtype=np.int64)[order], starts)
    rows = np.add.reduceat(np.asarray(responses, dtype=np.int64)[order], starts)
    capacity = whole_tiles(int(tokens.max()))
    longest = min(capacity, whole_tiles(int(np.max(lengths))))
    docs = int((counts + ceil_div(capacity - tokens, longest)).max())
    return Capacities(capacity, docs, whole_tiles(max(1, int(rows.max()))), longest)


def divided(bins: Sequence[Sequence[int]], lengths: np.ndarray, share: Share) -> list[int]:
    """The numbers of the bins that are this rank's, in their order: the costliest bin goes to the rank with the least
    work, and no rank gets more bins than an even division gives. Numbers from len(bins) on are bins without
    examples."""
    if share.size == 1:
        return list(range(len(bins)))
    each = ceil_div(len(bins), share.size)
    costs = [float((lengths[indices] * (1 + lengths[indices] / ATTENTION_COST)).sum()) for indices in map(list, bins)]
    loads, parts = [0.0] * share.size, [list[int]() for _ in range(share.size)]
    for number in sorted(range(len(bins)), key=lambda number: (-costs[number], number)):
        rank = min((r for r in range(share.size) if len(parts[r]) < each), key=lambda r: (loads[r], r))
        parts[rank].append(number)
        loads[rank] += costs[number]
    spare = itertools.count(len(bins))
    for part in parts:
        part.sort()
        part.extend(next(spare) for _ in range(each - len(part)))
    return parts[share.rank]


def whole_tiles(count: int) -> int:
    return ceil_div(count, TILE) * TILE


def pack(examples: Sequence[Example], *, layout: BatchLayout = PLAIN, shape: Capacities | None = None) -> PackedBatch:
    """One micro-batch, in exact shapes or in a fixed one. Without examples it is padding alone, of the least shape if
    none is given.

    Padding tokens form documents of their own after the real ones, of at most `shape.longest` tokens each;
    documents that are not there have length 0. Padding rows are row 0 with label -1. `layout` is the loss's.
    """
    lengths = lengths_of(examples)
    counts, total = lengths.tolist(), int(lengths.sum())
    assert all(counts), "an example has at least one token"
    tokens, supervised = flat(examples)
    bounds = np.cumsum([0, *counts])
    positions = np.arange(total) - np.repeat(bounds[:-1], lengths)
    targets = _targets(supervised, bounds)
    rows, labels = targets - 1, tokens[targets]
    real = len(targets)
    extra = {field.name: field.read(examples) if counts else np.zeros(0) for field in layout.fields}
    extra = {f.name: extra[f.name][targets] if f.per == "label" else extra[f.name] for f in layout.fields}
    if shape is None and not counts:
        shape = Capacities(1, 1, 1, 1)
    if shape is not None:
        spare = shape.capacity - total
        assert spare >= 0 and real <= shape.max_rows, "a batch exceeds its capacity"
        assert max(counts, default=0) <= shape.longest, "a document is longer than its bound"
        padding = [min(shape.longest, spare - start) for start in range(0, spare, shape.longest)]
        assert len(counts) + len(padding) <= shape.max_docs, "a batch has more documents than its capacity"
        tokens = np.pad(tokens, (0, spare))
        positions = np.concatenate([positions, np.arange(spare) % shape.longest])
        counts = [*counts, *padding, *[0] * (shape.max_docs - len(counts) - len(padding))]
        bounds = np.cumsum([0, *counts])
        rows = np.pad(rows, (0, shape.max_rows - real))
        labels = np.pad(labels, (0, shape.max_rows - real), constant_values=-1)
        for field in layout.fields:
            tail = field.length(shape.max_docs, shape.max_rows) - len(extra[field.name])
            extra[field.name] = np.pad(extra[field.name], (0, tail), constant_values=field.padding)
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions.astype(np.int64)),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        rows=torch.from_numpy(rows.astype(np.int64)),
        labels=torch.from_numpy(labels.astype(np.int64)),
        lengths=tuple(counts),
        response_tokens=real,
        divisor=float(real if layout.shares is None or not total else layout.shares(examples).sum()),
        extra={field.name: torch.from_numpy(extra[field.name]).to(field.dtype) for field in layout.fields},
    )


def targets_of(examples: Sequence[Example]) -> np.ndarray:
    """The places of the trained tokens among all tokens, end to end, as `pack` has them."""
    if not examples:
        return np.zeros(0, np.int64)
    return _targets(flat(examples)[1], np.concatenate([[0], np.cumsum(lengths_of(examples))]))


def _targets(supervised: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    supervised[bounds[:-1]] = False  # nothing before a document's first token predicts it
    return np.flatnonzero(supervised)


def pack_bins(
    examples: Sequence[Example],
    bins: Sequence[Sequence[int]],
    lengths: np.ndarray,
    layout: BatchLayout,
    share: Share,
    shape: Capacities | None = None,
) -> list[PackedBatch]:
    """This rank's share of the bins of a step, packed; without a shape, in exact ones. All ranks have equally many.
    `lengths`: those of all examples."""
    return [
        pack(take(examples, bins[number] if number < len(bins) else []), layout=layout, shape=shape)
        for number in divided(bins, lengths, share)
    ]


def pack_ahead(
    examples: Sequence[Example], layout: BatchLayout, capacity: int, share: Share, shape: Capacities | None = None
) -> tuple[PackedBatch, ...]:
    """This rank's batches of what the layout's `ahead` makes of all examples of a step, in exact shapes or in this."""
    ahead = layout.ahead
    assert ahead is not None
    made, own = ahead.make(examples), BatchLayout(fields=ahead.fields)
    bins = bins_in_order(made, capacity, own) if shape is None else bins_within(made, shape, own)
    return tuple(pack_bins(made, bins, lengths_of(made), own, share, shape))


def ahead_capacities(shape: Capacities, longest: int) -> Capacities:
    """The shape of batches of examples ahead of up to `longest` tokens, beside micro-batches of this shape."""
    longest = whole_tiles(longest)
    tokens = max(shape.capacity, longest)
    return Capacities(tokens, shape.max_docs + ceil_div(tokens, longest), shape.max_rows, longest)
