"""Continuations of prompts by a decoder alone, without a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graftune.infer.generate import requests_of, sampler_for
from graftune.infer.sample import Sampling
from graftune.model.decoder import Decoder


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stop_ids: Sequence[int],
    *,
    adapted: bool = True,
    backend: str = "cpu",
    budget: int = 1 << 40,
    on_tokens: Callable[[dict[int, int]], None] = lambda new: None,
) -> list[list[int]]:
    """Continuations without their stop token. `backend` is the attention that reads the prompts, `budget` the bytes
    of the cache; `on_tokens` gets {prompt: token} after every round, stop tokens too."""
    stops = set(stop_ids) | set(sampling.stop_ids)
    answers: list[list[int]] = [[] for _ in prompts]
    if not prompts:
        return []
    sampler = sampler_for(decoder, requests_of(decoder, prompts, sampling.max_new_tokens), budget, backend)
    for fresh in sampler.rounds(prompts, sampling, stop_ids, adapted=adapted):
        on_tokens({index: token.id for index, tokens in fresh.items() for token in tokens})
        for index, tokens in fresh.items():
            answers[index] += [token.id for token in tokens if token.id not in stops]
    return answers
