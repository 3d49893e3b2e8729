"""How many codes a value the inputs of each fp8 weight take on the way forward: two only where one costs too much.

One code is within 2^-4 of a value; two, hi + lo, within 2^-8, with a second product. What one costs is asked of the
sample that the weights are calibrated on: the divergence between what the model foretells with it and with two, as a
share of the loss. Where one for all is within `LIMIT`, that is it. Else two go to the weights where they save most for
a multiplication. Roundings of different weights hardly know of each other, so what they cost adds up (SmolLM2 in fp32:
its 30 layers by themselves 0.84%, its four groups 0.89%, all at once 0.81%), and a weight's part is about its layer's
by its group's: layers + 4 passes tell, of a quarter of the sample.

The weights are rounded too, and nothing here mends that. The more it costs, the less of the whole do better inputs take
off, for the same time: they may cost `OF_WEIGHTS` of it where that is more than `LIMIT`.

Any change at all makes bf16 round otherwise from there on. That divergence is in every figure once, however many
weights changed; so what the layers sum to beyond all at once is that noise, and it is taken off. What is chosen is
measured on the whole sample before it is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from graftune.batch import PackedBatch
from graftune.kernels import attention
from graftune.model.decoder import Decoder, PackedDocuments
from graftune.model.frozen import runs
from graftune.model.run import Pass

LIMIT = 0.0015  # of the loss: what weights that read one code a value may cost together
OF_WEIGHTS = 0.5  # of what rounding the weights costs: the same
TRIES = 3
LOGITS_BYTES = 64 << 20  # of the logits that exist at once, of each of the two

Inputs = tuple[int, ...]  # codes a value, of each weight in the order of Decoder.in_fp8


class Chosen(NamedTuple):
    """What it costs is a share of the loss; 0: not measured."""

    inputs: Inputs
    weights: float = 0.0  # of rounding the weights
    one: float = 0.0  # of one code for all, beside two
    taken: float = 0.0  # of what is taken, beyond the noise
    noise: float = 0.0


def choose(decoder: Decoder, batches: Sequence[PackedBatch], backend: str, unrounded: Sequence[torch.Tensor]) -> Chosen:
    """`unrounded`: of each batch the stream behind the last block [T, D] by weights as the base has them."""
    sizes, layers = [weight.out_features * weight.in_features for weight in decoder.in_fp8], len(decoder.blocks)
    count, groups = len(sizes), len(sizes) // layers
    ones = (1,) * count
    (whole,) = costs(decoder, batches, backend, [ones])
    found = Chosen((2,) * count, cost_of_weights(decoder, batches, backend, unrounded), whole)
    if whole <= LIMIT:
        return found._replace(inputs=ones, taken=whole)
    if not whole < float("inf"):  # also where it is no number
        return found
    one_layer = [tuple(1 if i // groups == layer else 2 for i in range(count)) for layer in range(layers)]
    one_group = [tuple(1 if i % groups == group else 2 for i in range(count)) for group in range(groups)]
    some = batches[: -(-len(batches) // 4)]
    together, *alone = costs(decoder, some, backend, [ones, *one_layer, *one_group])
    noise = noise_of(together, alone[:layers])
    by_layer, by_group = (_shares(part, noise) for part in (alone[:layers], alone[layers:]))
    shares = torch.outer(by_layer, by_group).flatten() * (whole - noise)
    limit = aim = limit_of(found.weights - noise)
    for _ in range(TRIES):
        mix = mixed(shares.tolist(), sizes, aim)
        taken = max(0.0, costs(decoder, batches, backend, [mix])[0] - noise)
        if taken <= limit:
            return found._replace(inputs=mix, taken=taken, noise=noise)
        aim *= 0.9 * limit / taken
    return found._replace(noise=noise)


def limit_of(weights: float) -> float:
    """What inputs may cost where rounding the weights costs this."""
    return max(LIMIT, OF_WEIGHTS * weights) if weights < float("inf") else LIMIT


def noise_of(together: float, alone: Sequence[float]) -> float:
    """What is in each of these divergences and in that of all together alike; not more than the least of them."""
    return max(0.0, min((sum(alone) - together) / max(1, len(alone) - 1), *alone))


def mixed(shares: Sequence[float], sizes: Sequence[int], limit: float) -> Inputs:
    """Two codes for those that save most for their size, until what the others cost is within the limit."""
    found, left = [1] * len(shares), sum(shares)
    for i in sorted(range(len(shares)), key=lambda i: shares[i] / sizes[i], reverse=True):
        if left <= limit:
            break
        found[i], left = 2, left - shares[i]
    return tuple(found)


def share_of_two(decoder: Decoder) -> float:
    """Of the multiplications of the forward products: how many are done for two codes."""
    sizes = [(weight.inputs, weight.out_features * weight.in_features) for weight in decoder.in_fp8]
    return sum(size for inputs, size in sizes if inputs == 2) / max(1, sum(size for _, size in sizes))


def costs(decoder: Decoder, batches: Sequence[PackedBatch], backend: str, mixes: Sequence[Inputs]) -> list[float]:
    """Mean KL divergence of the trained tokens' predictions from those with two codes everywhere, as a share of the
    loss of the latter: of each mix."""
    loss, *found = divergences(decoder, batches, backend, mixes).tolist()
    return [divergence / loss if loss > 0 else 0.0 for divergence in found]


def cost_of_weights(
    decoder: Decoder, batches: Sequence[PackedBatch], backend: str, unrounded: Sequence[torch.Tensor]
) -> float:
    """As in `costs`, of the decoder with two codes everywhere, from what the unrounded weights foretell."""
    sums = torch.zeros(2, dtype=torch.float64, device=decoder.device)
    for batch, stream in zip(batches, unrounded, strict=True):
        batch = batch.to(decoder.device)
        exact = stream.index_select(0, batch.rows)
        sums += _compared(decoder, batch, _hidden(decoder, batch, backend, 2), exact)
    loss, divergence = sums.tolist()
    return divergence / loss if loss > 0 else 0.0


def divergences(
    decoder: Decoder, batches: Sequence[PackedBatch], backend: str, mixes: Sequence[Inputs]
) -> torch.Tensor:
    """That loss, then those divergences; sums over the tokens, on the device."""
    sums = torch.zeros(1 + len(mixes), dtype=torch.float64, device=decoder.device)
    for batch in batches:
        batch = batch.to(decoder.device)
        exact = _hidden(decoder, batch, backend, 2)
        for number, mix in enumerate(mixes):
            loss, divergence = _compared(decoder, batch, _hidden(decoder, batch, backend, mix), exact)
            sums[1 + number] += divergence
            if not number:
                sums[0] += loss
    return sums


def _compared(decoder: Decoder, batch: PackedBatch, coarse: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """[2]: the loss of the exact hidden rows, and the divergence of the coarse ones from it; summed over the tokens."""
    sums = torch.zeros(2, dtype=torch.float64, device=decoder.device)
    for start, stop in runs(len(batch.labels), max(1, LOGITS_BYTES // (4 * decoder.spec.vocab))):
        said, meant = (decoder.logits(x[start:stop], adapted=False).log_softmax(-1) for x in (coarse, exact))
        sums[0] -= meant.gather(1, batch.labels[start:stop].unsqueeze(1)).sum()
        sums[1] += said.sub_(meant).mul_(meant.exp_()).sum().neg_()
    return sums


def _hidden(decoder: Decoder, batch: PackedBatch, backend: str, inputs: int | Inputs) -> torch.Tensor:
    decoder.set_inputs(inputs)
    return decoder.hidden(batch.tokens, begun(decoder, batch, backend), batch.rows)


def begun(decoder: Decoder, batch: PackedBatch, backend: str) -> Pass:
    """A pass over a batch on the device, adapters off."""
    documents = attention.Documents(batch.cu_seqlens, batch.lengths, max(batch.lengths))
    return decoder.begin(batch.positions, PackedDocuments(documents, backend), adapted=False)


def _shares(alone: Sequence[float], noise: float) -> torch.Tensor:
    """Each one's of all."""
    found = torch.tensor(alone, dtype=torch.float64).sub_(noise).clamp_(min=0)
    return found / found.sum().clamp_(min=1e-30)
