"""Loss and perplexity on response tokens, adapters on, by the same forward that trains.

On a GPU every batch has the same shape, the least that holds them all: cuDNN builds a plan for a shape, and an
evaluation comes back many times in a run. It is a shape of its own, since the validation data has other lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graftune.batch import Example
from graftune.data.encoded import lengths_of, responses_of, take
from graftune.data.pack import Capacities, capacities, pack
from graftune.kernels import attention
from graftune.model.decoder import Decoder, PackedDocuments


@dataclass(frozen=True)
class EvalResult:
    loss: float
    perplexity: float
    response_tokens: int
    examples: int


def evaluate(
    decoder: Decoder,
    examples: Sequence[Example],
    *,
    capacity: int,
    adapted: bool = True,
    backend: str = "cpu",
    between: Callable[[int], None] = lambda done: None,
) -> EvalResult:
    """Mean over all response tokens, not over batches. `between` is called with the examples done so far."""
    total, tokens, done = torch.zeros((), device=decoder.device), 0, 0
    groups = _groups(lengths_of(examples).tolist(), capacity)
    limits, longest = {}, 0
    if backend != "cpu" and groups:
        shape = shape_of(examples, capacity)
        limits, longest = shape._asdict(), shape.longest
    with torch.no_grad():
        for group in groups:
            batch = pack(take(examples, group), **limits).to(decoder.device)
            documents = attention.Documents(batch.cu_seqlens, batch.lengths, longest or max(batch.lengths))
            run = decoder.begin(batch.positions, PackedDocuments(documents, backend), adapted=adapted)
            stream = decoder.forward(batch.tokens, run, batch.rows)
            total += decoder.loss(stream, batch.labels, adapted=adapted, need_grad=False)[0]
            tokens, done = tokens + batch.response_tokens, done + len(group)
            between(done)
    loss = float(total) / max(1, tokens)
    return EvalResult(loss, math.exp(min(loss, 700.0)), tokens, len(examples))


def shape_of(examples: Sequence[Example], capacity: int) -> Capacities:
    """The least that holds every batch."""
    lengths = lengths_of(examples)
    return capacities(_groups(lengths.tolist(), capacity), lengths, responses_of(examples))


def _groups(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the examples, in order, as many to a batch as it holds."""
    groups: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room:
            groups.append([])
            room = max(capacity, length)
        groups[-1].append(index)
        room -= length
    return groups
