"""Text from a decoder: prefill the prompts packed, then one token a sequence at a time over the cache.

Several prompts run together, so that a weight is read once for all of them; a sequence leaves when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graftune.errors import GraftuneError
from graftune.infer.cache import Cache, Decode, Prefill
from graftune.infer.sample import Sampling, choose
from graftune.model.decoder import Decoder
from graftune.tokenizer import Tokenizer


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stop_ids: Sequence[int],
    *,
    adapted: bool = True,
    backend: str = "cpu",
    on_tokens: Callable[[dict[int, int]], None] = lambda new: None,
) -> list[list[int]]:
    """Continuations without their stop token. `backend` is the attention that reads the prompts; `on_tokens` gets
    {prompt: token} after every round, stop tokens too."""
    if not prompts:
        return []
    for prompt in prompts:
        if not 0 < len(prompt) < decoder.spec.max_positions:
            raise GraftuneError(
                f"a prompt has {len(prompt)} tokens", mend=f"it needs 1 to {decoder.spec.max_positions - 1} of them"
            )
    device, stops = decoder.device, set(stop_ids) | set(sampling.stop_ids)
    lengths = [len(p) for p in prompts]
    reaches = reaches_of(lengths, sampling.max_new_tokens, decoder.spec.max_positions)
    capacity = max(reaches)
    generator = torch.Generator().manual_seed(sampling.seed)
    cache = Cache(decoder.spec, lengths, capacity, device, decoder.compute, reaches)
    answers: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    with torch.no_grad():
        tokens = torch.tensor([t for p in prompts for t in p], device=device)
        x = read(decoder, tokens, lengths, cache, backend, adapted=adapted)
        while True:
            chosen = choose(decoder.logits(x, adapted=adapted), sampling, generator)
            fresh = dict(zip(alive, chosen.tolist(), strict=True))
            on_tokens(fresh)
            for index, token in fresh.items():
                if token not in stops:
                    answers[index].append(token)
            going = [
                place
                for place, index in enumerate(alive)
                if fresh[index] not in stops and len(prompts[index]) + len(answers[index]) < reaches[index]
            ]
            if not going:
                break
            if len(going) < len(alive):
                places = torch.tensor(going, device=device)
                alive = [alive[place] for place in going]
                cache.keep(places)
                chosen = chosen.index_select(0, places)
            x = go_on(decoder, chosen, cache, adapted=adapted)
    return answers


def read(
    decoder: Decoder, tokens: torch.Tensor, lengths: Sequence[int], cache: Cache, backend: str, *, adapted: bool = True
) -> torch.Tensor:
    """The prompts into the cache; the stream behind each one's last token, [S, D]."""
    positions = torch.cat([torch.arange(n, device=decoder.device) for n in lengths])
    last = torch.tensor(lengths, device=decoder.device).cumsum(0) - 1
    run = decoder.begin(positions, Prefill(cache, tuple(lengths), backend), adapted=adapted)
    return decoder.hidden(tokens, run, last)


def go_on(decoder: Decoder, tokens: torch.Tensor, cache: Cache, *, adapted: bool = True) -> torch.Tensor:
    """One more token a sequence, [S] to [S, D]."""
    x = decoder.hidden(tokens, decoder.begin(cache.lengths, Decode(cache), adapted=adapted))
    cache.lengths += 1
    return x


def reaches_of(lengths: Sequence[int], new_tokens: int, positions: int) -> list[int]:
    """Tokens that prompts of these lengths come to, at most."""
    return [min(n + new_tokens, positions) for n in lengths]


def in_groups(reaches: Sequence[int], room: int) -> list[list[int]]:
    """Prompts, by number, that are continued together: as many in a row as have room in one cache, each at least by
    itself. A cache has the longest one's length for all."""
    groups: list[list[int]] = []
    for index, reach in enumerate(reaches):
        held = [reaches[i] for i in groups[-1]] if groups else []
        if held and max(*held, reach) * (len(held) + 1) <= room:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def cache_room(capacity: int, recompute: str) -> int:
    """Tokens of the cache that questions are answered in: no more than what a step of so many tokens takes. One that
    keeps its activations takes several times as much a token."""
    return capacity * (4 if recompute in ("none", "selective") else 1)


class TextStream:
    """Tokens in, printable text out: a character split over several tokens is held back until it is whole."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], None], stop_ids: Sequence[int]):
        self.tokenizer, self.write, self.stops = tokenizer, write, set(stop_ids)
        self.tokens: list[int] = []
        self.shown = 0

    def push(self, token: int) -> None:
        if token in self.stops:
            return
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens, skip_special=True)
        if not text.endswith("\ufffd"):
            self._show(text)

    def finish(self) -> None:
        """What was held back is not going to be completed: show it as it is."""
        self._show(self.tokenizer.decode(self.tokens, skip_special=True))

    def _show(self, text: str) -> None:
        if len(text) > self.shown:
            self.write(text[self.shown :])
            self.shown = len(text)
