"""The loss's figures on data that does not train, adapters on, by the same forward that trains.

On a GPU every batch has the same shape, the least that holds them all: cuDNN builds a plan for a shape, and an
evaluation comes back many times in a run. It is a shape of its own, since the validation data has other lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch

from graftune.batch import PLAIN, BatchLayout, Example, PackedBatch
from graftune.data.encoded import lengths_of, responses_of, take
from graftune.data.pack import Capacities, capacities, members, pack, unit_lengths, units_of
from graftune.losses import Computed, CrossEntropy, Loss, base_log_probs
from graftune.model.decoder import Decoder


@dataclass(frozen=True)
class EvalResult:
    loss: float
    perplexity: float | None  # None where the loss has no cross-entropy
    response_tokens: int
    examples: int
    figures: dict[str, float] = field(default_factory=dict)  # the loss's own, by name

    def document(self) -> dict[str, float | None]:
        """All of it by name, the loss's own figures among the rest."""
        rest = asdict(self)
        return rest | rest.pop("figures")


def evaluate(
    decoder: Decoder,
    examples: Sequence[Example],
    *,
    capacity: int,
    loss: Loss | None = None,
    adapted: bool = True,
    backend: str = "cpu",
    between: Callable[[int], None] = lambda done: None,
) -> EvalResult:
    """Means over all the data by the loss's divisor, not over batches. Without a `loss`: cross-entropy, every response
    token alike. `between` is called with the examples done so far."""
    loss = loss or CrossEntropy()
    sums = torch.zeros(1 + len(loss.figures), device=decoder.device)
    divisor, tokens, done = 0.0, 0, 0
    layout = loss.layout(examples)
    groups = _bins(examples, capacity, layout)
    limits, longest = {}, None
    if backend != "cpu" and groups:
        shape = shape_of(examples, capacity, layout)
        limits, longest = shape._asdict(), shape.longest
    with torch.no_grad():
        for group in groups:
            batch = pack(take(examples, group), layout=layout, **limits).to(decoder.device)
            found = evaluate_batch(decoder, batch, loss, longest, adapted=adapted, backend=backend)
            sums[0] += found.total
            if found.figures is not None:
                sums[1:] += found.figures
            divisor, tokens, done = divisor + batch.divisor, tokens + batch.response_tokens, done + len(group)
            between(done)
    mean, *others = (value / (divisor or 1.0) for value in sums.tolist())
    figures = dict(zip(loss.figures, others, strict=True))
    cross_entropy = loss.cross_entropy(mean, figures)
    perplexity = None if cross_entropy is None else math.exp(min(cross_entropy, 700.0))
    return EvalResult(mean, perplexity, tokens, len(examples), figures)


def evaluate_batch(
    decoder: Decoder, batch: PackedBatch, loss: Loss, longest: int | None, *, adapted: bool = True, backend: str = "cpu"
) -> Computed:
    """The loss of one batch, without a gradient."""
    run = decoder.begin_batch(batch, backend, longest, adapted=adapted)
    base = base_log_probs(decoder, batch, run) if loss.needs_base else None
    return loss(
        decoder.read_out(decoder.forward(batch.tokens, run, batch.rows), adapted=adapted), batch, base, need_grad=False
    )


def shape_of(examples: Sequence[Example], capacity: int, layout: BatchLayout = PLAIN) -> Capacities:
    """The least that holds every batch."""
    return capacities(_bins(examples, capacity, layout), lengths_of(examples), responses_of(examples))


def _bins(examples: Sequence[Example], capacity: int, layout: BatchLayout) -> list[list[int]]:
    """Indices of the examples, in order, as many to a batch as it holds; those of one group together."""
    units = units_of(None if layout.groups is None else layout.groups(examples), len(examples))
    bins: list[list[int]] = []
    left = 0  # tokens that the last batch can still take
    for index, length in enumerate(unit_lengths(lengths_of(examples), units).tolist()):
        if length > left:
            bins.append([])
            left = max(capacity, length)
        bins[-1].append(index)
        left -= length
    return [members(units, held) for held in bins]
