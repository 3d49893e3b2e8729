"""Computes the loss and its figures on validation data, with the forward pass of training.

On a GPU every batch has the same shape, the smallest that holds any of them: cuDNN builds a plan for each shape, and a
run evaluates many times. It differs from the training shape, since the validation data has other lengths.

Several ranks divide the batches. Each batch's sums are kept separately and added at the end in the order of the
batches, so the result is identical to the bit for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from graftune.batch import PLAIN, BatchLayout, Example, PackedBatch
from graftune.data.encoded import lengths_of, responses_of, take
from graftune.data.pack import (
    Capacities,
    ahead_capacities,
    bins_in_order,
    capacities,
    divided,
    pack,
    pack_ahead,
    targets_of,
)
from graftune.losses import Computed, CrossEntropy, Loss, checked, reference_log_probs, reference_of, sums_ahead
from graftune.model.arena import Start
from graftune.model.decoder import Decoder
from graftune.ranks import WHOLE, Share

OnProgress = Callable[[int], None]  # called with the number of examples done so far
GatherLists = Callable[[list[Any]], list[list[Any]]]  # this rank's list of JSON values -> all ranks' lists


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


@torch.no_grad()
def evaluate(
    decoder: Decoder,
    examples: Sequence[Example],
    *,
    capacity: int,
    loss: Loss | None = None,
    adapted: bool = True,
    backend: str = "cpu",
    between: OnProgress = lambda done: None,
    share: Share = WHOLE,
    gather: GatherLists = lambda sums: [sums],
    start: Start | None = None,
) -> EvalResult:
    """Compute means over all the data (not means of batches), by the loss's divisor. Without a `loss`: cross-entropy
    with equal weights. `share`: this rank's share; `gather`: collects the sums of all ranks. `start`: see Step."""
    loss = loss or CrossEntropy()
    layout = loss.layout(examples)
    ahead = None
    if layout.ahead is not None:
        ahead = torch.zeros(loss.ahead, device=decoder.device)
        shape = None
        if backend != "cpu" and len(examples):
            shape = ahead_capacities(shape_of(examples, capacity, layout), layout.ahead.longest(examples))
        for one in pack_ahead(examples, layout, capacity, share, shape):  # all the data is one step
            batch = one.to(decoder.device)
            ctx = decoder.begin_batch(batch, backend, shape.longest if shape else None, adapted=adapted)
            ahead += sums_ahead(loss, decoder, batch, ctx, start)
        ranks = [sums for part in gather([ahead.tolist()]) for sums in part]
        ahead = torch.tensor(ranks, dtype=torch.float64).sum(0).to(ahead)
    sums, facts = list[torch.Tensor](), list[tuple[int, float, int]]()
    for number, _, batch, longest in _batches(decoder, examples, capacity, layout, backend, share, between):
        found = evaluate_batch(
            decoder, batch, loss, longest, adapted=adapted, backend=backend, start=start, ahead=ahead
        )
        figures = () if found.figures is None else found.figures.unbind()
        sums.append(torch.stack((found.total, *figures)))
        facts.append((number, batch.divisor, batch.response_tokens))
    on_host = torch.stack(sums).tolist() if sums else []
    own = [[*fact, numbers] for fact, numbers in zip(facts, on_host, strict=True)]
    kept = sorted(one for part in gather(own) for one in part)  # in the order of the batches' numbers
    divisor, response_tokens = sum(one[1] for one in kept), sum(one[2] for one in kept)
    total, *others = (sum(one[3][place] for one in kept) for place in range(1 + loss.sums))
    mean = total / (divisor or 1.0)
    means = loss.means(torch.tensor(others, dtype=torch.float64), divisor or 1.0).tolist()
    named = dict(zip(loss.figures, means, strict=True))
    cross_entropy = loss.cross_entropy(mean, named)
    perplexity = None if cross_entropy is None else math.exp(min(cross_entropy, 700.0))
    return EvalResult(mean, perplexity, response_tokens, len(examples), named)


@torch.no_grad()
def reference_pass(
    decoder: Decoder,
    examples: Sequence[Example],
    loss: Loss,
    *,
    capacity: int,
    backend: str = "cpu",
    between: OnProgress = lambda done: None,
    share: Share = WHOLE,
    start: Start | None = None,
) -> torch.Tensor:
    """log p under the loss's reference model, on the device: per example (fp64) or, if `reference_per` is label, per
    token (fp32), examples end to end, 0 for tokens that are not trained. Other ranks' examples are 0, so that the sum
    over ranks has all."""
    per_token, lengths = loss.reference_per == "label", lengths_of(examples)
    starts = np.cumsum(lengths) - lengths
    count, dtype = (int(lengths.sum()), torch.float32) if per_token else (len(examples), torch.float64)
    found = torch.zeros(count, dtype=dtype, device=decoder.device)
    for _, group, batch, longest in _batches(decoder, examples, capacity, PLAIN, backend, share, between):
        ctx = decoder.begin_batch(batch, backend, longest)
        log_probs = reference_log_probs(loss, decoder, batch, ctx, start)[: batch.response_tokens]
        # One index per label. The examples of a batch are consecutive in the data.
        held = take(examples, group)
        places = starts[group[:1]].sum() + targets_of(held) if per_token else np.repeat(group, responses_of(held))
        found.index_add_(0, torch.from_numpy(places).to(decoder.device), log_probs.to(dtype))
    return found


def _batches(
    decoder: Decoder,
    examples: Sequence[Example],
    capacity: int,
    layout: BatchLayout,
    backend: str,
    share: Share,
    between: OnProgress,
) -> Iterator[tuple[int, list[int], PackedBatch, int | None]]:
    """This rank's batches of all the data, in order: the number of each, its examples, the batch on the device, and the
    bound on the length of its documents if it has a fixed shape."""
    groups = bins_in_order(examples, capacity, layout)
    shape = shape_of(examples, capacity, layout) if backend != "cpu" and groups else None
    done = 0
    for number in divided(groups, lengths_of(examples), share):
        group = groups[number] if number < len(groups) else []
        packed = pack(take(examples, group), layout=layout, shape=shape)
        yield number, group, packed.to(decoder.device), shape.longest if shape else None
        done += len(group)
        between(min(len(examples), done * share.size))


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
    """The loss of one batch, without a gradient. `ahead`: the sums that the loss needs ahead of it; None: zeros."""
    if loss.ahead:
        known = torch.zeros(loss.ahead, device=decoder.device) if ahead is None else ahead
        batch = replace(batch, extra={**batch.extra, "ahead": known})
    ctx = decoder.begin_batch(batch, backend, longest, adapted=adapted)
    reference = reference_of(loss, decoder, batch, ctx, start)
    stream = decoder.forward(batch.tokens, ctx, batch.rows)
    output = decoder.read_out(stream, adapted=adapted, temperature=loss.temperature)
    return checked(loss, loss(output, batch, reference, need_grad=False), output.normed, need_grad=False)


def shape_of(examples: Sequence[Example], capacity: int, layout: BatchLayout = PLAIN) -> Capacities:
    return capacities(bins_in_order(examples, capacity, layout), lengths_of(examples), responses_of(examples))
