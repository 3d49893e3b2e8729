"""Continuations of prompts by a decoder alone, without a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graftune.infer.generate import rounds
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
    on_tokens: Callable[[dict[int, int]], None] = lambda new: None,
) -> list[list[int]]:
    """Continuations without their stop token. `backend` is the attention that reads the prompts; `on_tokens` gets
    {prompt: token} after every round, stop tokens too."""
    stops = set(stop_ids) | set(sampling.stop_ids)
    answers: list[list[int]] = [[] for _ in prompts]
    for fresh in rounds(decoder, prompts, sampling, stop_ids, adapted=adapted, backend=backend):
        on_tokens({index: token.id for index, token in fresh.items()})
        for index, token in fresh.items():
            if token.id not in stops:
                answers[index].append(token.id)
    return answers
