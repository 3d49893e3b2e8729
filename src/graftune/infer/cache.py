"""The cache of generation: pages of keys and values, and slots of states, in memory of a fixed size.

Each layer's mixer makes its own part (`MixerSpec.new_cache`). All layers with the same window have the same pages, so
a sequence has one page table for each window. Its pages are taken when it starts, for as many tokens as it can
have at most, so that it never has to wait or stop for memory later. With a window a sequence reuses its own pages in
turn, so it has no more than the window and one pass need. Samples of the same prompt share its whole pages.

Page 0 of every pool belongs to no sequence (kernels/paged_attention).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from graftune.arithmetic import ceil_div
from graftune.kernels import attention, launch, rehearsal
from graftune.kernels.paged_attention import PAGE, PagedKeys
from graftune.kernels.short_conv import Columns
from graftune.model.context import RowCopy
from graftune.model.spec import ModelSpec

CACHE = "cache of generation"  # the plan's owner
MOST_PLACES = 256  # sequences that are continued together
CHUNK = 1024  # tokens of one prompt that are read in one pass
PASS_TOKENS = 4096  # tokens of all prompts that are read in one pass

Pages = dict[int, list[int]]  # by window


class CacheSize(NamedTuple):
    """The bytes of a cache, from the mixers: a state per sequence, and keys and values per token."""

    per_sequence: int
    per_token: dict[int, int]  # by window
    most_per_token: int  # of all layers, if each kept as much as the largest one

    @staticmethod
    def of(spec: ModelSpec, dtype: torch.dtype) -> CacheSize:
        per_sequence, most, per_token = 0, 0, dict[int, int]()
        for kind, count in spec.kinds.items():
            one = kind.mixer.cache_bytes(dtype)
            per_sequence, most = per_sequence + one.per_sequence * count, max(most, one.per_token)
            if one.per_token:
                per_token[one.window] = per_token.get(one.window, 0) + one.per_token * count
        # Where no layer keeps anything per token, each counts as much as the residual stream.
        return CacheSize(per_sequence, per_token, (most or spec.width * dtype.itemsize) * len(spec.layers))


class Request(NamedTuple):
    prompt: int  # tokens
    final: int  # tokens that a sample can grow to
    samples: int = 1

    @property
    def cached(self) -> int:
        """Prompt tokens in the cache before the first draw: all but the last, which each sample reads itself."""
        return self.prompt - 1

    @property
    def first_own(self) -> int:
        """The index of the first page that each sample has to itself."""
        return self.cached // PAGE if self.samples > 1 else 0


def held_pages(tokens: int, window: int) -> int:
    """Pages that so many tokens of a sequence need."""
    pages = ceil_div(tokens, PAGE)
    return min(pages, ceil_div(window + CHUNK, PAGE) + 1) if window else pages


def own_pages(request: Request, window: int) -> int:
    return held_pages(request.final - request.first_own * PAGE, window)


def shared_pages(request: Request, window: int) -> int:
    return held_pages(request.cached, window) if request.samples > 1 else 0


class CacheShape(NamedTuple):
    """Everything that determines the memory of a cache."""

    places: int  # sequences that are continued together
    pages: Mapping[int, int]  # by window, without page 0
    width: int  # pages of one sequence at most: the width of its table

    @staticmethod
    def of(size: CacheSize, requests: Sequence[Request], budget: float, most: int = MOST_PLACES) -> CacheShape:
        """The shape for as many samples at once as fit into `budget` bytes, at least one and no more than `most`,
        counting those that need the most memory."""
        needs = [
            {w: own_pages(one, w) + (0 if number else shared_pages(one, w)) for w in size.per_token}
            for one in requests
            for number in range(min(one.samples, MOST_PLACES))
        ]
        costs = [sum(need[w] * PAGE * size.per_token[w] for w in need) + size.per_sequence for need in needs]
        pages, left, places = dict.fromkeys(size.per_token, 0), budget, 0
        for index in sorted(range(len(needs)), key=lambda i: -costs[i])[:most]:
            left -= costs[index]
            if places and left < 0:
                break
            places += 1
            pages = {w: pages[w] + needs[index][w] for w in pages}
        pages = {w: max(count, *(need[w] for need in needs)) for w, count in pages.items()}  # each one fits by itself
        return CacheShape(places, pages, max(ceil_div(one.final, PAGE) for one in requests))

    def holds(self, requests: Sequence[Request]) -> bool:
        """Whether every single sample fits, so that each of them gets its turn."""
        return all(
            ceil_div(one.final, PAGE) <= self.width
            and all(own_pages(one, w) + shared_pages(one, w) <= count for w, count in self.pages.items())
            for one in requests
        )

    def covers(self, other: CacheShape) -> bool:
        enough = all(self.pages.get(window, 0) >= count for window, count in other.pages.items())
        return enough and self.places >= other.places and self.width >= other.width

    def joined(self, other: CacheShape) -> CacheShape:
        pages = {w: max(self.pages.get(w, 0), count) for w, count in other.pages.items()}
        return CacheShape(max(self.places, other.places), pages, max(self.width, other.width))

    def rounded_up(self) -> CacheShape:
        """With page counts rounded up to powers of two: a chat that grows with every turn then outgrows its cache only
        a few times, and every new cache needs new graphs."""
        pages = {window: launch.power_of_two(count) for window, count in self.pages.items()}
        return CacheShape(self.places, pages, launch.power_of_two(self.width))

    def bytes(self, size: CacheSize) -> int:
        rows = sum((count + 1) * PAGE * size.per_token[window] for window, count in self.pages.items())
        return rows + (self.places + 1) * size.per_sequence


class Cache:
    """The tensors of a cache, and its free pages. States have a slot for every place and a spare one, which keeps those
    of a prompt with waiting samples."""

    def __init__(self, spec: ModelSpec, shape: CacheShape, device: torch.device, dtype: torch.dtype):
        self.shape, self.device = shape, device
        rows = {window: (count + 1) * PAGE for window, count in shape.pages.items()}
        with rehearsal.owned(CACHE):
            self.layers = [layer.mixer.new_cache(shape.places + 1, rows, device, dtype) for layer in spec.layers]
            table = (shape.places, shape.width)
            self.tables = {window: torch.zeros(table, dtype=torch.int32, device=device) for window in rows}
            self.starts = torch.arange(shape.places + 1, dtype=torch.int32, device=device)
        self.free: Pages = {}
        self.reset()

    def reset(self) -> None:
        """All pages are free."""
        self.free = {window: list(range(count, 0, -1)) for window, count in self.shape.pages.items()}

    @property
    def spare(self) -> int:
        return self.shape.places

    def take(self, counts: Mapping[int, int]) -> Pages | None:
        """So many pages for each window; None if there are not enough."""
        if any(len(self.free[window]) < count for window, count in counts.items()):
            return None
        return {window: [self.free[window].pop() for _ in range(count)] for window, count in counts.items()}

    def give(self, pages: Pages) -> None:
        for window, some in pages.items():
            self.free[window] += some

    def write_tables(self, places: Sequence[int], lines: Sequence[Pages]) -> None:
        """Write the page tables of the sequences at these places. `lines`: the pages of each, in order."""
        if not places:
            return
        at = launch.uploaded(places, self.device)
        for window, table in self.tables.items():
            padded = [page for line in lines for page in line[window] + [0] * (self.shape.width - len(line[window]))]
            fresh = launch.uploaded(padded, self.device).view(len(places), -1)
            table.index_copy_(0, at, fresh.to(torch.int32))

    def copy_(self, slots: Sequence[tuple[int, int]], pages: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Copy states and, by window, whole pages: pairs of (from, to)."""
        rows = {window: self._pair(pages.get(window, ()), PAGE) for window in self.tables}
        pair = self._pair(slots, 1)
        for layer in self.layers:
            if layer is not None:
                layer.copy_(pair, rows)

    def clear_(self, slots: Sequence[int]) -> None:
        at = launch.uploaded(slots, self.device)
        for layer in self.layers:
            if layer is not None:
                layer.clear_(at)

    def _pair(self, pairs: Sequence[tuple[int, int]], rows: int) -> RowCopy:
        flat = [one[side] * rows + row for side in (0, 1) for one in pairs for row in range(rows)]
        source, target = launch.uploaded(flat, self.device).view(2, -1)
        return source, target


def line_of(request: Request, window: int, shared: Sequence[int], own: Sequence[int]) -> list[int]:
    """A sample's line of the page table: the shared pages of its prompt, then its own."""
    first, total = request.first_own, ceil_div(request.final, PAGE)
    return [shared[i % len(shared)] for i in range(first)] + [own[i % len(own)] for i in range(total - first)]


class Prefill:
    """A pass over packed pieces of prompts, which fills the cache. For each piece, `slots`: its slot; `before`: tokens
    before it that are in the cache (0 for all pieces or for none); `finals`: the length its sequence can grow to."""

    def __init__(
        self, cache: Cache, slots: Sequence[int], before: Sequence[int], lengths: Sequence[int], finals: Sequence[int],
        backend: str,
    ):  # fmt: skip
        device, ends = cache.device, [sum(lengths[: i + 1]) for i in range(len(lengths))]
        self.cache, self.layers, self.backend = cache, cache.layers, backend
        packed = launch.uploaded([*slots, *before, *finals, 0, *ends], device)
        count = len(slots)
        self.slots, self.before, self.finals = packed[:count], packed[count : 2 * count], packed[2 * count : 3 * count]
        self.documents = attention.Documents(packed[3 * count :].to(torch.int32), tuple(lengths), max(lengths))
        self.new, self.bound = not any(before), max(b + n for b, n in zip(before, lengths, strict=True))
        self.counts = launch.uploaded(lengths, device)
        self.positions = launch.uploaded(
            [position for b, n in zip(before, lengths, strict=True) for position in range(b, b + n)], device
        )
        self._paged, self._columns = dict[int, PagedKeys](), dict[int, Columns]()

    @property
    def past(self) -> Prefill:
        return self

    def final_lengths(self, positions: torch.Tensor) -> torch.Tensor:
        return self.finals.repeat_interleave(self.counts, output_size=len(positions))

    def paged(self, window: int) -> PagedKeys:
        if window not in self._paged:
            table = self.cache.tables[window].index_select(0, self.slots)
            places = torch.arange(len(self.slots), device=self.cache.device)
            sequence = places.repeat_interleave(self.counts, output_size=len(self.positions))
            page = table.view(-1).index_select(0, sequence * table.shape[1] + self.positions // PAGE)
            rows, documents = page.long() * PAGE + self.positions % PAGE, self.documents
            self._paged[window] = PagedKeys(
                table, documents.cu_seqlens, self.before, rows, documents.lengths, self.bound
            )  # fmt: skip
        return self._paged[window]

    def columns(self, reach: int) -> Columns:
        if reach not in self._columns:
            self._columns[reach] = Columns.of(self.documents.lengths or (), reach, self.cache.device)
        return self._columns[reach]


class Decode:
    """A pass over one new token of each of the first places; each attends to its own past. A place whose sequence has
    ended reads a single key and writes to page 0."""

    documents, backend, new = None, "", False

    def __init__(
        self, cache: Cache, positions: torch.Tensor, live: torch.Tensor, finals: torch.Tensor, bound: int
    ):  # fmt: skip
        self.cache, self.layers, self.positions, self.live = cache, cache.layers, positions, live
        self.finals, self.bound, self.slots = finals, bound, cache.starts
        self._paged = dict[int, PagedKeys]()

    @property
    def past(self) -> Decode:
        return self

    def final_lengths(self, positions: torch.Tensor) -> torch.Tensor:
        return self.finals

    def paged(self, window: int) -> PagedKeys:
        if window not in self._paged:
            count, at = len(self.positions), self.positions
            table = self.cache.tables[window][:count]
            page = table.gather(1, (at // PAGE).unsqueeze(1)).squeeze(1)
            rows = torch.where(self.live, page.long() * PAGE + at % PAGE, 0)
            self._paged[window] = PagedKeys(table, self.cache.starts[: count + 1], at, rows, None, self.bound)
        return self._paged[window]

    def columns(self, reach: int) -> Columns:
        raise AssertionError("one new token has no columns to join")


def cache_capacity(tokens: int, recompute: str) -> int:
    """The number of tokens in the cache for answers. It takes no more memory than a step of `tokens` tokens; a step
    that saves its activations takes several times as much per token."""
    return tokens * (4 if recompute in ("none", "selective") else 1)
