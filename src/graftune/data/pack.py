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
come out even some ranks get a bin without examples, whose batch (`pack_nothing`) adds nothing to loss or gradients.
What is in a bin and which number it has in its step depends on no rank.
"""

from __future__ import annotations

import itertools
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
    """A fixed shape, by the names of `pack`'s arguments."""

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
    units = units_of(groups, len(lengths))
    sizes = unit_lengths(lengths, units)
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
        steps.append([members(units, indices) for indices in step.bins if indices])
    return steps


Units = list[range] | None  # the members of each group, which follow each other; None: each example is its own


def units_of(groups: np.ndarray | None, count: int) -> Units:
    """What is placed as one: each run of equal numbers."""
    if groups is None:
        return None
    assert len(groups) == count, "a group number per example"
    starts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist()] if count else []
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], count], strict=True)]


def unit_lengths(lengths: Sequence[int] | np.ndarray, units: Units) -> np.ndarray:
    """Tokens of what is placed as one."""
    lengths = np.asarray(lengths, dtype=np.int64)
    return lengths if not units else np.add.reduceat(lengths, [unit.start for unit in units])


def largest(examples: Sequence[Example], layout: BatchLayout) -> int:
    """Tokens that a micro-batch has to hold at least: those of the longest example, or of the largest group."""
    units = units_of(None if layout.groups is None else layout.groups(examples), len(examples))
    return int(unit_lengths(lengths_of(examples), units).max(initial=0))


def members(units: Units, numbers: list[int]) -> list[int]:
    """The indices of the examples of these units."""
    return numbers if units is None else [index for unit in numbers for index in units[unit]]


def bins_in_order(
    examples: Sequence[Example],
    capacity: int,
    layout: BatchLayout,
    *,
    docs: int | None = None,
    rows: int | None = None,
) -> list[list[int]]:
    """Indices of the examples, in order, as many to a batch as it holds tokens, documents and rows; those of one group
    together. A longer one has a batch of its own."""
    units = units_of(None if layout.groups is None else layout.groups(examples), len(examples))
    needs, limits = [lengths_of(examples)], [capacity]
    if docs is not None:
        needs, limits = [*needs, np.ones(len(examples), np.int64)], [*limits, docs]
    if rows is not None:
        needs, limits = [*needs, responses_of(examples)], [*limits, rows]
    bins: list[list[int]] = []
    left = [0] * len(limits)  # what the last batch can still take
    for index, need in enumerate(zip(*(unit_lengths(each, units).tolist() for each in needs), strict=True)):
        if any(map(gt, need, left)):
            bins.append([])
            left = list(map(max, limits, need))
        bins[-1].append(index)
        left = list(map(sub, left, need))
    return [members(units, indices) for indices in bins]


def bins_within(examples: Sequence[Example], shape: Capacities, layout: BatchLayout) -> list[list[int]]:
    """The same in batches of a fixed shape."""
    return bins_in_order(examples, shape.capacity, layout, docs=shape.real_docs, rows=shape.max_rows)


def largest_units(examples: Sequence[Example], layout: BatchLayout) -> Capacities:
    """The least that holds every example, or every group, alone. Documents of padding are not counted."""
    units = units_of(None if layout.groups is None else layout.groups(examples), len(examples))
    alone: Sequence[Sequence[int]] = [[index] for index in range(len(examples))] if units is None else units
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


def pack(
    examples: Sequence[Example],
    *,
    layout: BatchLayout = PLAIN,
    capacity: int | None = None,
    max_docs: int | None = None,
    max_rows: int | None = None,
    longest: int | None = None,
) -> PackedBatch:
    """One micro-batch. Without capacities the shapes are exact; with them (tokens, documents, rows) they are fixed.

    Padding tokens form documents of their own after the real ones, of at most `longest` tokens each, which `max_docs`
    has to count; documents that are not there have length 0. Padding rows are row 0 with label -1.
    `layout` is the loss's.
    """
    assert examples, "a micro-batch holds at least one example"
    counts = lengths_of(examples).tolist()
    total = sum(counts)
    assert all(counts), "an example has at least one token"
    tokens, supervised = flat(examples)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    positions = np.arange(total) - np.repeat(bounds[:-1], counts)
    targets = _targets(supervised, bounds)
    rows, labels = targets - 1, tokens[targets]
    real = len(targets)
    extra = {field.name: field.read(examples) for field in layout.fields}
    extra = {f.name: extra[f.name][targets] if f.per == "label" else extra[f.name] for f in layout.fields}
    if capacity is not None:
        assert max_docs is not None and max_rows is not None, "a fixed shape fixes all three capacities"
        spare = capacity - total
        assert spare >= 0 and real <= max_rows, "a batch exceeds its capacity"
        assert longest is None or max(counts) <= longest, "a document is longer than its bound"
        piece = longest or max(1, spare)
        padding = [min(piece, spare - start) for start in range(0, spare, piece)]
        assert len(counts) + len(padding) <= max_docs, "a batch has more documents than its capacity"
        tokens = np.pad(tokens, (0, spare))
        positions = np.concatenate([positions, np.arange(spare) % piece])
        counts = [*counts, *padding, *[0] * (max_docs - len(counts) - len(padding))]
        bounds = np.concatenate([[0], np.cumsum(counts)])
        rows = np.pad(rows, (0, max_rows - real))
        labels = np.pad(labels, (0, max_rows - real), constant_values=-1)
        for field in layout.fields:
            tail = field.length(max_docs, max_rows) - len(extra[field.name])
            extra[field.name] = np.pad(extra[field.name], (0, tail), constant_values=field.padding)
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions.astype(np.int64)),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        rows=torch.from_numpy(rows.astype(np.int64)),
        labels=torch.from_numpy(labels.astype(np.int64)),
        lengths=tuple(counts),
        response_tokens=real,
        divisor=float(real if layout.shares is None else layout.shares(examples).sum()),
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


def pack_nothing(
    layout: BatchLayout = PLAIN,
    *,
    capacity: int = 1,
    max_docs: int = 1,
    max_rows: int = 1,
    longest: int = 1,
) -> PackedBatch:
    """A micro-batch without examples: padding alone, of a fixed shape or of the least there is."""
    counts = [min(longest, capacity - start) for start in range(0, capacity, longest)]
    assert len(counts) <= max_docs, "a batch has more documents than its capacity"
    counts += [0] * (max_docs - len(counts))
    padded = {f.name: torch.full((f.length(max_docs, max_rows),), f.padding, dtype=f.dtype) for f in layout.fields}
    return PackedBatch(
        tokens=torch.zeros(capacity, dtype=torch.int64),
        positions=torch.arange(capacity) % longest,
        cu_seqlens=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
        rows=torch.zeros(max_rows, dtype=torch.int64),
        labels=torch.full((max_rows,), -1),
        lengths=tuple(counts),
        response_tokens=0,
        extra=padded,
    )


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
    limits = {} if shape is None else shape._asdict()
    return [
        pack(take(examples, bins[number]), layout=layout, **limits)
        if number < len(bins)
        else pack_nothing(layout, **limits)
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
