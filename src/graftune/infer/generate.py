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
    on_tokens: Callable[[dict[int, int]], None] = lambda new: None,
) -> list[list[int]]:
    """Continuations without their stop token. `on_tokens` gets {prompt: token} after every round, stop tokens too."""
    if not prompts:
        return []
    for prompt in prompts:
        if not 0 < len(prompt) < decoder.spec.max_positions:
            raise GraftuneError(
                f"a prompt has {len(prompt)} tokens", mend=f"it needs 1 to {decoder.spec.max_positions - 1} of them"
            )
    device, stops = decoder.device, set(stop_ids) | set(sampling.stop_ids)
    lengths = [len(p) for p in prompts]
    rooms = [min(sampling.max_new_tokens, decoder.spec.max_positions - n) for n in lengths]
    reaches = [n + room for n, room in zip(lengths, rooms, strict=True)]
    capacity = max(reaches)
    generator = torch.Generator().manual_seed(sampling.seed)
    cache = Cache(decoder.spec, lengths, capacity, device, decoder.compute, reaches)
    answers: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    with torch.no_grad():
        tokens = torch.tensor([t for p in prompts for t in p], device=device)
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        run = decoder.begin(positions, Prefill(cache, tuple(lengths)), adapted=adapted)
        x = decoder.hidden(tokens, run, last)
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
                if fresh[index] not in stops and len(answers[index]) < rooms[index]
            ]
            if not going:
                break
            if len(going) < len(alive):
                places = torch.tensor(going, device=device)
                alive = [alive[place] for place in going]
                cache.keep(places)
                chosen = chosen.index_select(0, places)
            run = decoder.begin(cache.lengths, Decode(cache), adapted=adapted)
            x = decoder.hidden(chosen, run)
            cache.lengths += 1
    return answers


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
