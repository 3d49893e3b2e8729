"""Continues many prompts: waiting samples take the places of those that have ended, so that a batch never runs for its
slowest sequence alone.

A prompt is read once, however many samples it has (all but its last token, which every sample reads itself, so that its
first token is drawn like all others). The samples share the pages that the prompt fills, and copy the partly filled
last one and the states. A sample's random numbers follow from the seed, its number and the position, so that a sample
is the same in any batch.

On CUDA the host reads the tokens of a block of rounds after it has queued the next block, so that the device never
waits for the host. On a CPU it reads after every round.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from graftune import graph
from graftune.errors import GraftuneError
from graftune.graph import Captured
from graftune.infer import cache as caches
from graftune.infer.cache import Cache, CacheShape, CacheSize, Pages, Request
from graftune.infer.decode_batch import ROUNDS, STOPS, DecodeBatch, DrawnRounds, Piece, passes
from graftune.infer.sample import Sampling
from graftune.kernels import draw
from graftune.kernels.paged_attention import PAGE
from graftune.model.decoder import Decoder

SHORT = 128  # in calls of at most this many new tokens, all rounds compute the same number of places


class Token(NamedTuple):
    id: int
    logprob: float = 0.0  # under the model: temperature, top-k and top-p left out
    sampling_logprob: float = 0.0  # at the sampling temperature over the whole vocabulary; greedy: 0


@dataclass(eq=False)
class Prompt:
    """A prompt and its samples that have not started."""

    tokens: Sequence[int]
    request: Request
    waiting: deque[int]
    unfinished: int
    pages: Pages = field(default_factory=dict)  # shared by its samples
    was_read: bool = False


@dataclass(eq=False)
class Running:
    """A sample that has a place."""

    index: int
    prompt: Prompt
    place: int
    pages: Pages  # its own
    left: int  # tokens that it can still draw
    queued: int = 0  # queued rounds whose tokens the host has not read


class Sampler:
    """A cache and the graphs over it. One call at a time uses them; they stay for the next call."""

    def __init__(self, decoder: Decoder, shape: CacheShape, backend: str = "cpu"):
        self.decoder, self.shape = decoder, shape
        self.cache = Cache(decoder.spec, shape, decoder.device, decoder.compute)
        self.batch = DecodeBatch(decoder, self.cache, backend)
        # Not in the batch, which they refer to: a cycle would keep the cache's memory until the next collection.
        self.graphs: dict[tuple[int, str, bool], Captured] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.batch.ahead else None
        self.waiting: deque[Prompt] = deque()
        self.running: dict[int, Running] = {}  # by place
        self.busy = False
        self.least = 0  # the fewest sequences that a round computes, whether they have ended or not

    def rounds(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        stop_ids: Sequence[int],
        *,
        adapted: bool = True,
        ended: Collection[int] = (),
        numbers: Sequence[int] | None = None,
    ) -> Iterator[dict[int, list[Token]]]:
        """Yields new tokens, {prompt: tokens}, until every prompt has ended; a stop token is a prompt's last. Equal
        prompts that follow each other are samples of one prompt. One that the caller adds to `ended` between two yields
        gets no more. `numbers`: one per sample (default 0, 1, 2 ...); it and the seed determine the random numbers."""
        stops = sorted(set(stop_ids) | set(sampling.stop_ids))
        if len(stops) > STOPS:
            raise GraftuneError(f"there are {len(stops)} stop tokens", fix=f"give at most {STOPS}")
        assert not self.busy, "a sampler continues the prompts of one call at a time"
        self.busy, numbers = True, numbers or range(len(prompts))
        try:
            self.batch.begin(sampling, stops, adapted)
            # Depends on the call alone, because a round's size may change the last bits of its results.
            self.least = min(len(prompts), self.shape.places) if sampling.max_new_tokens <= SHORT else 0
            self.waiting.extend(prompts_of(prompts, requests_of(self.decoder, prompts, sampling.max_new_tokens)))
            yield from self._continue(set(stops), numbers, ended)
        finally:
            self.waiting.clear()
            self.running.clear()
            self.cache.reset()
            self.busy = False

    def _continue(
        self, stops: set[int], numbers: Sequence[int], ended: Collection[int]
    ) -> Iterator[dict[int, list[Token]]]:
        queued: tuple[DrawnRounds, dict[int, Running]] | None = None
        while self.waiting or self.running or queued is not None:
            self.admit(numbers)
            before, queued = queued, None
            if self.running and (count := max(one.left - one.queued for one in self.running.values())) > 0:
                queued = self._queue(count), dict(self.running)
                if not self.batch.ahead:  # without a stream there is nothing to overlap
                    before, queued = queued, None
            if before is not None:
                fresh = self._look(*before, stops)
                if fresh:
                    yield fresh
                for one in list(self.running.values()):
                    if one.index in ended:
                        self.batch.end(one.place)
                        self._finish(one)

    def admit(self, numbers: Sequence[int]) -> None:
        """Give free places to waiting samples, in order, and read their prompts."""
        started = list[Running]()
        free = [place for place in range(self.shape.places) if place not in self.running]
        while self.waiting and free:
            prompt = self.waiting[0]
            pages = self._take(prompt)
            if pages is None:
                assert self.running, "the cache has room for every single sample"
                break
            index = prompt.waiting.popleft()
            left = prompt.request.final - prompt.request.prompt
            started.append(Running(index, prompt, free.pop(0), pages, left))
            self.running[started[-1].place] = started[-1]
            if not prompt.waiting:
                self.waiting.popleft()
        if started:
            self._read_prompts(started)
            begun = [
                (one.prompt.tokens[-1], one.prompt.request.cached, one.prompt.request.final, numbers[one.index])
                for one in started
            ]
            self.batch.start([one.place for one in started], begun)
        size = self._size() if self.running else 0
        inside = [place for place in range(size) if place not in self.running]
        moves = list(zip([place for place in sorted(self.running) if place >= size], inside, strict=False))
        if moves:
            self.batch.move(moves)
            for source, target in moves:
                self.running[target] = self.running.pop(source)
                self.running[target].place = target

    def _take(self, prompt: Prompt) -> Pages | None:
        """The pages of one more sample, and those of its prompt if it is the first one."""
        request, windows = prompt.request, self.cache.free
        own = self.cache.take({window: caches.own_pages(request, window) for window in windows})
        if own is None or request.samples == 1 or prompt.pages:
            return own
        shared = self.cache.take({window: caches.shared_pages(request, window) for window in windows})
        if shared is None:
            self.cache.give(own)
            return None
        prompt.pages = shared
        return own

    def _read_prompts(self, started: Sequence[Running]) -> None:
        """Fill the cache up to the last token of each sample's prompt."""
        lines, leaders = list[Pages](), dict[int, Running]()
        for one in started:
            request, pages = one.prompt.request, one.prompt.pages
            lines.append({w: caches.line_of(request, w, pages.get(w, ()), own) for w, own in one.pages.items()})
            if not one.prompt.was_read:
                leaders.setdefault(id(one.prompt), one)
        reading = [one for one in leaders.values() if one.prompt.request.cached]
        # The first sample's place reads the prompt: into the shared pages if there are other samples.
        first_lines = [self._line_of_prompt(one) for one in reading]
        self.cache.write_tables([one.place for one in reading], first_lines)
        whole = [Piece(one.place, 0, one.prompt.tokens[:-1], one.prompt.request.final) for one in reading]
        for some in passes(whole):
            self.batch.read(some)
        self.cache.write_tables([one.place for one in started], lines)
        self._share(started, leaders)

    def _line_of_prompt(self, one: Running) -> Pages:
        request, shared = one.prompt.request, one.prompt.pages
        if request.samples == 1:
            return {w: caches.line_of(request, w, (), own) for w, own in one.pages.items()}
        count = caches.ceil_div(request.cached, PAGE)
        return {w: [pages[i % len(pages)] for i in range(count)] for w, pages in shared.items()}

    def _share(self, started: Sequence[Running], leaders: dict[int, Running]) -> None:
        """Copy what samples of one prompt cannot share: the states, and the page that the prompt fills partly."""
        slots, pages = list[tuple[int, int]](), {window: list[tuple[int, int]]() for window in self.cache.tables}
        empty = [one.place for one in started if not one.prompt.request.cached]
        if empty:
            self.cache.clear_(empty)
        for one in started:
            prompt, request = one.prompt, one.prompt.request
            if request.samples == 1 or not request.cached:
                continue
            leader = leaders.get(id(prompt))
            if one is not leader:
                slots.append((self.cache.spare if leader is None else leader.place, one.place))
            if request.cached % PAGE:
                for window, shared in prompt.pages.items():
                    pages[window].append((shared[request.first_own % len(shared)], one.pages[window][0]))
        kept = [one for one in leaders.values() if one.prompt.waiting and one.prompt.request.cached]
        if slots or kept or any(pages.values()):
            self.cache.copy_([*slots, *((one.place, self.cache.spare) for one in kept)], pages)
        for one in started:
            one.prompt.was_read = True

    def _queue(self, wanted: int) -> DrawnRounds:
        """Queue a block of rounds, no more than `wanted`, which is the most that any sample can use."""
        count = min(ROUNDS if self.batch.ahead else 1, wanted)
        for one in self.running.values():
            one.queued += count
        bound = max(one.prompt.request.final - one.left + one.queued for one in self.running.values()) - 1
        return self.queue_rounds(count, self._size(), bound)

    def _size(self) -> int:
        """Places of a round. On CUDA a short call has one size, because capturing a graph for each size that it shrinks
        to would take longer than the smaller rounds save."""
        return self.batch.size_for(max(len(self.running), self.least if self.batch.ahead else 0))

    def queue_rounds(self, count: int, size: int, bound: int) -> DrawnRounds:
        """Queue `count` rounds over the first `size` places. No sequence has more than `bound` keys in the last one."""
        key = size, self.batch.mode, self.batch.adapted
        if key not in self.graphs:
            work = functools.partial(self.batch.round, *key)
            on_cuda = self.batch.device.type == "cuda"
            self.graphs[key] = Captured(work, enabled=on_cuda, pool=self.pool, collect=False)  # it needs little memory
        self.batch.bound = bound
        return self.batch.rounds(self.graphs[key], count, size)

    def _look(self, block: DrawnRounds, owners: dict[int, Running], stops: set[int]) -> dict[int, list[Token]]:
        """Wait for a block of rounds and return its new tokens by sample. Frees the places of samples that ended."""
        block.arrived.synchronize()
        fresh: dict[int, list[Token]] = {}
        rounds = block.drawn.tolist()
        for place, one in owners.items():
            one.queued -= len(rounds)
            for tokens, logprobs, sampling_logprobs in rounds:
                if self.running.get(one.place) is not one or tokens[place] < 0:
                    break
                token = Token(int(tokens[place]), logprobs[place], sampling_logprobs[place])
                fresh.setdefault(one.index, []).append(token)
                one.left -= 1
                if token.id in stops or not one.left:
                    self._finish(one)
        return fresh

    def _finish(self, one: Running) -> None:
        del self.running[one.place]
        self.cache.give(one.pages)
        one.prompt.unfinished -= 1
        if not one.prompt.unfinished:
            self.cache.give(one.prompt.pages)


def requests_of(decoder: Decoder, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Request]:
    """The requests for the cache: one per prompt, and one for equal prompts that follow each other."""
    found, positions = list[Request](), decoder.spec.max_positions
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) < positions:
            raise GraftuneError(f"a prompt has {len(prompt)} tokens", fix=f"it needs 1 to {positions - 1} of them")
        before = prompts[index - 1] if index else None
        if before is not None and (before is prompt or list(before) == list(prompt)):
            found[-1] = found[-1]._replace(samples=found[-1].samples + 1)
        else:
            found.append(Request(len(prompt), min(len(prompt) + new_tokens, positions)))
    return found


def prompts_of(prompts: Sequence[Sequence[int]], requests: Sequence[Request]) -> Iterator[Prompt]:
    start = 0
    for request in requests:
        yield Prompt(prompts[start], request, deque(range(start, start + request.samples)), request.samples)
        start += request.samples


def sampler_for(
    decoder: Decoder,
    requests: Sequence[Request],
    budget: int,
    backend: str,
    kept: Sampler | None = None,
    planned: CacheShape | None = None,
) -> Sampler:
    """`kept` if its cache is large enough and free; else a new one, at least as large where the budget allows. A
    `planned` shape is used for every call in which each sample fits it."""
    size = CacheSize.of(decoder.spec, decoder.compute)
    use_planned = planned is not None and planned.holds(requests)
    shape = planned if planned is not None and use_planned else CacheShape.of(size, requests, budget)
    if kept is not None and kept.shape.covers(shape) and not kept.busy:
        return kept
    if kept is not None and not use_planned:
        joined = kept.shape.joined(shape)
        fitting = (one for one in (joined.rounded_up(), joined) if one.bytes(size) <= budget)
        shape = next(fitting, shape)
    return Sampler(decoder, shape, backend)


def rehearse(
    decoder: Decoder,
    requests: Sequence[Request],
    shape: CacheShape,
    backend: str,
    mode: str = draw.GREEDY,
    stream: Any = None,
) -> Sampler:
    """Run what needs the most memory: the largest passes over prompts, and one round, on the stream that captures."""
    sampler = Sampler(decoder, shape, backend)
    sampler.batch.mode = mode
    batch, longest = sampler.batch, sorted(requests, key=lambda one: -one.prompt)[: sampler.shape.places]
    pieces = [Piece(i, 0, [0] * one.cached, one.final) for i, one in enumerate(longest) if one.cached]
    found = passes(pieces)
    for past in (False, True):
        some = [one for one in found if bool(one[0].start) == past]
        if some:
            batch.read(max(some, key=lambda one: sum(len(piece.tokens) for piece in one)))
    with nullcontext() if stream is None else graph.on(stream):
        sampler.queue_rounds(1, shape.places, max(one.final for one in requests))
    return sampler
