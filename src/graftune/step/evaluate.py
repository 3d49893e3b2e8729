"""Computes the loss and its figures on validation data, with the forward pass of training.

On a GPU every batch has the same shape, the smallest that holds any of them: cuDNN builds a plan for each shape, and a
run evaluates many times. It differs from the training shape, since the validation data has other lengths.

Several ranks divide the batches. Each batch's sums are kept separately and added at the end in the order of the
batches, so the result is identical to the bit for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from graftune.batch import PLAIN, BatchLayout, Example, PackedBatch
from graftune.data.encoded import lengths_of, responses_of, take
from graftune.data.pack import Capacities, bins_in_order, capacities, divided, pack, pack_ahead, pack_nothing
from graftune.losses import Computed, CrossEntropy, Loss, checked, reference_log_probs, sums_ahead
from graftune.model.decoder import Decoder
from graftune.model.start import Start
from graftune.ranks import WHOLE, Share

Gather = Callable[[list[Any]], list[list[Any]]]  # this rank's list of JSON values -> all ranks' lists


@dataclass(frozen=True)
class EvalResult:
    """The result of an evaluation."""

    loss: float  # the mean over all response tokens, or over the loss's own divisor
    perplexity: float | None  # None if the loss has no cross-entropy
    response_tokens: int  # tokens predicted
    examples: int  # examples read
    figures: dict[str, float] = field(default_factory=dict)  # the loss's own, by name

    def document(self) -> dict[str, float | None]:
        """All fields by name, with the loss's own figures at the same level."""
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
    share: Share = WHOLE,
    gather: Gather = lambda sums: [sums],
    start: Start | None = None,
) -> EvalResult:
    """Compute means over all the data (not means of batches), by the loss's divisor. Without a `loss`: cross-entropy
    with equal weights. `between` is called with the number of examples done so far. `share`: this rank's share;
    `gather`: collects the sums of all ranks. `start`: see Step."""
    loss = loss or CrossEntropy()
    layout = loss.layout(examples)
    groups = bins_in_order(examples, capacity, layout)
    limits, longest = {}, None
    if backend != "cpu" and groups:
        shape = shape_of(examples, capacity, layout)
        limits, longest = shape._asdict(), shape.longest
    mine = divided(groups, lengths_of(examples), share)
    ahead = None
    if layout.ahead is not None:
        ahead = torch.zeros(loss.ahead, device=decoder.device)
        with torch.no_grad():
            for one in pack_ahead(examples, layout, capacity, share):  # all the data is one step
                batch = one.to(decoder.device)
                ctx = decoder.begin_batch(batch, backend, adapted=adapted)
                ahead += sums_ahead(loss, decoder, batch, ctx, start)
        ranks = [sums for part in gather([ahead.tolist()]) for sums in part]
        ahead = torch.tensor(ranks, dtype=torch.float64).sum(0).to(ahead)
    sums = torch.zeros(len(mine), 1 + loss.sums, device=decoder.device)
    divisors, tokens, done = list[float](), list[int](), 0
    with torch.no_grad():
        for row, number in zip(sums, mine, strict=True):
            group = groups[number] if number < len(groups) else []
            packed = pack(take(examples, group), layout=layout, **limits) if group else pack_nothing(layout, **limits)
            batch = packed.to(decoder.device)
            found = evaluate_batch(
                decoder, batch, loss, longest, adapted=adapted, backend=backend, start=start, ahead=ahead
            )
            row[0] = found.total
            if found.figures is not None:
                row[1:] = found.figures
            divisors.append(batch.divisor)
            tokens.append(batch.response_tokens)
            done += len(group)
            between(min(len(examples), done * share.size))
    own = [[number, *facts] for number, *facts in zip(mine, divisors, tokens, sums.tolist(), strict=True)]
    kept = sorted(one for part in gather(own) for one in part)  # in the order of the batches' numbers
    divisor, response_tokens = sum(one[1] for one in kept), sum(one[2] for one in kept)
    total, *others = (sum(one[3][place] for one in kept) for place in range(sums.shape[1]))
    mean = total / (divisor or 1.0)
    means = loss.means(torch.tensor(others, dtype=torch.float64), divisor or 1.0).tolist()
    figures = dict(zip(loss.figures, means, strict=True))
    cross_entropy = loss.cross_entropy(mean, figures)
    perplexity = None if cross_entropy is None else math.exp(min(cross_entropy, 700.0))
    return EvalResult(mean, perplexity, response_tokens, len(examples), figures)


def evaluate_batch(
    decoder: Decoder,
    batch: PackedBatch,
    loss: Loss,
    longest: int | None,
    *,
    adapted: bool = True,
    backend: str = "cpu",
    start: Start | None = None,
    ahead: torch.Tensor | None = None,
) -> Computed:
    """The loss of one batch, without a gradient. `ahead`: the loss's sums before it; None: zeros."""
    if loss.ahead:
        known = torch.zeros(loss.ahead, device=decoder.device) if ahead is None else ahead
        batch = replace(batch, extra={**batch.extra, "ahead": known})
    ctx = decoder.begin_batch(batch, backend, longest, adapted=adapted)
    reference = reference_log_probs(loss, decoder, batch, ctx, start)
    stream = decoder.forward(batch.tokens, ctx, batch.rows)
    output = decoder.read_out(stream, adapted=adapted, temperature=loss.temperature)
    return checked(loss, loss(output, batch, reference, need_grad=False), output.normed, need_grad=False)


def shape_of(examples: Sequence[Example], capacity: int, layout: BatchLayout = PLAIN) -> Capacities:
    """The smallest shape that holds every batch."""
    return capacities(bins_in_order(examples, capacity, layout), lengths_of(examples), responses_of(examples))
