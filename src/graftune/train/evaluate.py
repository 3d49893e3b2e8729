"""Loss and perplexity on response tokens, adapters on, by the same forward that trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graftune.batch import Example
from graftune.data.pack import pack
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
    between: Callable[[int], None] = lambda done: None,
) -> EvalResult:
    """Mean over all response tokens, not over batches. `between` is called with the examples done so far."""
    total, tokens, done = torch.zeros((), device=decoder.device), 0, 0
    with torch.no_grad():
        for group in _groups(examples, capacity):
            batch = pack(group).to(decoder.device)
            run = decoder.begin(batch.positions, PackedDocuments(batch.lengths), adapted=adapted)
            x = decoder.hidden(batch.tokens, run, batch.rows)
            total += decoder.loss(x, batch.labels, adapted=adapted, need_grad=False)[0]
            tokens, done = tokens + batch.response_tokens, done + len(group)
            between(done)
    loss = float(total) / max(1, tokens)
    return EvalResult(loss, math.exp(min(loss, 700.0)), tokens, len(examples))


def _groups(examples: Sequence[Example], capacity: int) -> list[list[Example]]:
    groups: list[list[Example]] = []
    room = 0
    for example in examples:
        if len(example.tokens) > room:
            groups.append([])
            room = max(capacity, len(example.tokens))
        groups[-1].append(example)
        room -= len(example.tokens)
    return groups
