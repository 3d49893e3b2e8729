"""Generates text: prefills the packed prompts, then computes one token per sequence at a time with the cache.

Several prompts are batched, so that a weight is read once for all of them; a sequence leaves the batch when it ends. On
CUDA the step to the next token is captured in a graph, because launching its kernels one by one would be host-bound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from graftune.errors import GraftuneError
from graftune.graph import Captured
from graftune.infer.cache import Cache, CacheSize, Decode, Prefill
from graftune.infer.sample import Sampling
from graftune.kernels import draw
from graftune.model.decoder import Decoder


class Token(NamedTuple):
    id: int
    logprob: float = 0.0  # under the model: temperature, top-k and top-p left out
    sampling_logprob: float = 0.0  # at the sampling temperature over the whole vocabulary; greedy: 0


def rounds(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stop_ids: Sequence[int],
    *,
    adapted: bool = True,
    backend: str = "cpu",
    ended: Collection[int] = (),
    numbers: Sequence[int] | None = None,
) -> Iterator[dict[int, Token]]:
    """Yields one more token of every unfinished prompt, {prompt: token}, each round; a stop token is a prompt's last. A
    prompt that the caller adds to `ended` between two rounds gets no more. `numbers`: the number of each sample, from
    which and the seed its random numbers follow; else 0, 1, 2 ..."""
    for prompt in prompts:
        if not 0 < len(prompt) < decoder.spec.max_positions:
            raise GraftuneError(
                f"a prompt has {len(prompt)} tokens", fix=f"it needs 1 to {decoder.spec.max_positions - 1} of them"
            )
    if not prompts:
        return
    device, stops = decoder.device, set(stop_ids) | set(sampling.stop_ids)
    lengths = [len(p) for p in prompts]
    final_lengths = final_lengths_of(lengths, sampling.max_new_tokens, decoder.spec.max_positions)
    settings, samples = sampling.settings(device), torch.tensor(numbers or range(len(prompts)), device=device)
    positions = torch.tensor(lengths, device=device)
    cache = Cache(decoder.spec, lengths, max(final_lengths), device, decoder.compute, final_lengths)
    alive = list(range(len(prompts)))
    tokens = torch.tensor([t for p in prompts for t in p], device=device)
    with torch.no_grad():
        logits = decoder.logits(prefill(decoder, tokens, lengths, cache, backend, adapted=adapted), adapted=adapted)
    step = TokenStep(decoder, cache, adapted=adapted, fixed=device.type == "cuda")
    while True:
        drawn = draw.draw(logits, sampling.mode, settings, samples, positions)
        chosen, positions = drawn.tokens, positions + 1
        fresh = {index: Token(*one) for index, *one in zip(alive, *(x.tolist() for x in drawn), strict=True)}
        yield fresh
        for index in alive:
            lengths[index] += 1
        going = [
            place
            for place, index in enumerate(alive)
            if fresh[index].id not in stops and lengths[index] < final_lengths[index] and index not in ended
        ]
        if not going:
            return
        if len(going) < len(alive):
            places = torch.tensor(going, device=device)
            alive = [alive[place] for place in going]
            step.keep(places)
            chosen, samples, positions = (x.index_select(0, places) for x in (chosen, samples, positions))
        logits = step(chosen)


class TokenStep:
    """Computes the next logits of every unfinished sequence: [S] tokens to [S, V] logits.

    With `fixed` the step keeps its first shape, and on CUDA it is replayed from a graph from the second call on: ended
    sequences are still computed, and their tokens are ignored. Otherwise they are removed from the cache.
    """

    def __init__(self, decoder: Decoder, cache: Cache, *, adapted: bool = True, fixed: bool = False):
        self.decoder, self.cache, self.adapted = decoder, cache, adapted
        self.rows = cache.sequences  # of the batch: the unfinished sequences
        self.fixed = FixedStep(decoder, cache, adapted) if fixed else None
        self.replayed = Captured(self.fixed, enabled=decoder.device.type == "cuda") if self.fixed else None

    def keep(self, places: torch.Tensor) -> None:
        """Continues only the sequences at these indices of the unfinished ones."""
        if self.fixed is None:
            self.cache.keep(places)
        else:
            self.rows = self.rows.index_select(0, places)

    @torch.no_grad()
    def __call__(self, chosen: torch.Tensor) -> torch.Tensor:
        if self.fixed is None or self.replayed is None:
            return _step(self.decoder, chosen, self.cache, self.adapted)
        self.fixed.tokens.index_copy_(0, self.rows, chosen)
        self.decoder.bundles.restore_first_blocks()  # training or evaluation may have run since the last token
        self.replayed()
        logits = self.fixed.logits
        assert logits is not None
        return logits if len(self.rows) == len(logits) else logits.index_select(0, self.rows)


class FixedStep:
    """The step from one fixed buffer into another, so that it can be captured in a graph."""

    def __init__(self, decoder: Decoder, cache: Cache, adapted: bool):
        self.decoder, self.cache, self.adapted = decoder, cache, adapted
        self.tokens = torch.zeros_like(cache.sequences)
        self.logits: torch.Tensor | None = None

    @torch.no_grad()
    def __call__(self) -> None:
        found = _step(self.decoder, self.tokens, self.cache, self.adapted)
        if self.logits is None:  # at the first call, which is not captured: a graph owns what its capture allocates
            self.logits = torch.empty_like(found)
        self.logits.copy_(found)
        self.cache.lengths.clamp_(max=len(self.cache.token_indices) - 1)  # of sequences that have ended


def _step(decoder: Decoder, tokens: torch.Tensor, cache: Cache, adapted: bool) -> torch.Tensor:
    return decoder.logits(decode(decoder, tokens, cache, adapted=adapted), adapted=adapted)


@torch.no_grad()
def prefill(
    decoder: Decoder, tokens: torch.Tensor, lengths: Sequence[int], cache: Cache, backend: str, *, adapted: bool = True
) -> torch.Tensor:
    """Writes the prompts into the cache and returns the residual stream at the last token of each, [S, D]."""
    positions = torch.cat([torch.arange(n, device=decoder.device) for n in lengths])
    last = torch.tensor(lengths, device=decoder.device).cumsum(0) - 1
    run = decoder.begin(positions, Prefill(cache, tuple(lengths), backend), adapted=adapted)
    return decoder.hidden(tokens, run, last)


@torch.no_grad()
def decode(decoder: Decoder, tokens: torch.Tensor, cache: Cache, *, adapted: bool = True) -> torch.Tensor:
    """Runs one more token of each sequence, [S] to [S, D]."""
    x = decoder.hidden(tokens, decoder.begin(cache.lengths, Decode(cache), adapted=adapted))
    cache.lengths += 1
    return x


def final_lengths_of(lengths: Sequence[int], new_tokens: int, positions: int) -> list[int]:
    """The most tokens that prompts of these lengths can grow to."""
    return [min(n + new_tokens, positions) for n in lengths]


def in_groups(final_lengths: Sequence[int], capacity: int, size: CacheSize) -> list[list[int]]:
    """Groups of prompts, by index, that are continued together: as many consecutive ones as fit, at least one. The
    cache reserves the longest prompt's length for each. It may take as many bytes as `capacity` tokens take if every
    layer stores their keys and values."""
    groups: list[list[int]] = []
    for index, length in enumerate(final_lengths):
        group = [final_lengths[i] for i in groups[-1]] if groups else []
        if group and size.bytes(len(group) + 1, max(*group, length)) <= capacity * size.most_per_token:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def cache_capacity(tokens: int, recompute: str) -> int:
    """The number of tokens in the cache for answers. It takes no more memory than a step of `tokens` tokens; a step
    that saves its activations takes several times as much per token."""
    return tokens * (4 if recompute in ("none", "selective") else 1)
