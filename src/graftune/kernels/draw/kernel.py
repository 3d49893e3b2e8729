"""Two passes over the logits: sums and maxima of blocks of the vocabulary, then one block of each row is read again to
find the token. top-k and top-p need a threshold first: it is found by bisection over the bits of the logits, one
program a row, which reads the row from cache some 60 times. Sorting would move all of it through memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.draw.reference import START
from graftune.kernels.dropout.kernel import _mix

if TYPE_CHECKING:
    from graftune.kernels.draw import DrawSettings

BLOCK = 4096
SEARCH_BLOCK = 8192


def draw(
    logits: torch.Tensor, mode: str, settings: DrawSettings, samples: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, vocabulary = logits.shape
    blocks, device = triton.cdiv(vocabulary, BLOCK), logits.device
    figures = torch.empty(4, rows, blocks, dtype=torch.float32, device=device)
    likeliest = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    least = torch.empty(rows, dtype=torch.int32, device=device)
    if mode == "limited":
        _search[(rows,)](
            logits, least, settings.temperature, settings.top_k, settings.top_p, vocabulary, logits.stride(0),
            BLOCK=min(SEARCH_BLOCK, launch.power_of_two(vocabulary)), num_warps=16,
        )  # fmt: skip
    options = {"GREEDY": mode == "greedy", "LIMITED": mode == "limited", "BLOCK": BLOCK}
    _sums[(rows, blocks)](
        logits, least, figures, likeliest, settings.temperature, vocabulary, logits.stride(0), rows, blocks, **options,
        num_warps=8,
    )  # fmt: skip
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs, sampling_logprobs = torch.empty(2, rows, dtype=torch.float32, device=device)
    _choose[(rows,)](
        logits, least, figures, likeliest, settings.temperature, settings.seed, samples, positions, tokens, logprobs,
        sampling_logprobs, vocabulary, logits.stride(0), rows, blocks, START, NB=launch.power_of_two(blocks),
        **options, num_warps=8,
    )  # fmt: skip
    return tokens, logprobs, sampling_logprobs


@triton.jit
def _read(row, at, V):
    return tl.load(row + at, at < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _ordered(x):
    """The bits of x as an integer that is ordered as x is."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@launch.kernel
def _search(logits, least, temperature_ptr, k_ptr, p_ptr, V, stride, BLOCK: tl.constexpr):
    """The smallest ordered logit of a row that top-k and top-p keep."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    inverse = 1.0 / tl.load(temperature_ptr)
    at = tl.arange(0, BLOCK)
    k = tl.load(k_ptr)
    k = tl.where((k <= 0) | (k > V), V, k)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, V, BLOCK):
        highest = tl.maximum(highest, _read(base, first + at, V))
    top = tl.max(highest, 0)
    # The largest threshold that at least k logits reach: the k-th largest logit.
    lower, upper = tl.full([], -(2**31), tl.int64), tl.full([], 2**31 - 1, tl.int64)
    while lower < upper:
        middle = lower + (upper - lower + 1) // 2
        count = tl.zeros([BLOCK], tl.int32)
        for first in range(0, V, BLOCK):
            x = _read(base, first + at, V)
            count += ((first + at < V) & (_ordered(x) >= middle)).to(tl.int32)
        enough = tl.sum(count, 0) >= k
        lower = tl.where(enough, middle, lower)
        upper = tl.where(enough, upper, middle - 1)
    kth = lower
    p = tl.load(p_ptr)
    if p < 1.0:
        mass = tl.zeros([BLOCK], tl.float32)
        for first in range(0, V, BLOCK):
            x = _read(base, first + at, V)
            mass += tl.where((first + at < V) & (_ordered(x) >= kth), tl.exp((x - top) * inverse), 0.0)
        limit = p * tl.sum(mass, 0)
        # The smallest threshold above which less than the limit lies.
        lower, upper = kth, _ordered(top).to(tl.int64)
        while lower < upper:
            middle = lower + (upper - lower) // 2
            mass = tl.zeros([BLOCK], tl.float32)
            for first in range(0, V, BLOCK):
                x = _read(base, first + at, V)
                mass += tl.where((first + at < V) & (_ordered(x) > middle), tl.exp((x - top) * inverse), 0.0)
            less = tl.sum(mass, 0) < limit
            lower = tl.where(less, lower, middle + 1)
            upper = tl.where(less, middle, upper)
        kth = lower
    tl.store(least + row, kth.to(tl.int32))


@triton.jit
def _kept(x, exists, least, row, LIMITED: tl.constexpr):
    if LIMITED:
        exists = exists & (_ordered(x) >= tl.load(least + row))
    return exists


@launch.kernel
def _sums(
    logits, least, figures, likeliest, temperature_ptr, V, stride, rows, blocks, GREEDY: tl.constexpr,
    LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one block of a row: the largest logit and its token; the sums of exp(x - largest), of the same at the
    temperature, and of what the limits keep of that."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    exists = at < V
    x = _read(logits + row * stride, at, V)
    highest = tl.max(x, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    place, plane = figures + row * blocks + block, rows * blocks
    tl.store(place, highest)
    tl.store(place + plane, tl.sum(tl.exp(x - base), 0))
    tl.store(likeliest + row * blocks + block, tl.min(tl.where(exists & (x == highest), at, V), 0))
    if not GREEDY:
        weights = tl.exp((x - base) * (1.0 / tl.load(temperature_ptr)))
        tl.store(place + 2 * plane, tl.sum(weights, 0))
        tl.store(place + 3 * plane, tl.sum(tl.where(_kept(x, exists, least, row, LIMITED), weights, 0.0), 0))


@launch.kernel
def _choose(
    logits, least, figures, likeliest, temperature_ptr, seed_ptr, samples, positions, tokens, logprobs,
    sampling_logprobs, V, stride, rows, blocks, START: tl.constexpr, NB: tl.constexpr, GREEDY: tl.constexpr,
    LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, NB)
    place, plane, real = figures + row * blocks + number, rows * blocks, number < blocks
    highest = tl.load(place, real, other=float("-inf"))
    top = tl.max(highest, 0)
    total = tl.sum(tl.load(place + plane, real, other=0.0) * tl.exp(highest - top), 0)
    if GREEDY:
        best = tl.load(likeliest + row * blocks + number, real & (highest == top), other=V)
        tl.store(tokens + row, tl.min(best, 0).to(tl.int64))
        tl.store(logprobs + row, -tl.log(total))
        tl.store(sampling_logprobs + row, 0.0)
    else:
        inverse = 1.0 / tl.load(temperature_ptr)
        grown = tl.exp((highest - top) * inverse)
        whole = tl.sum(tl.load(place + 2 * plane, real, other=0.0) * grown, 0)
        kept = tl.load(place + 3 * plane, real, other=0.0) * grown
        sums = tl.cumsum(kept, 0)
        target = _uniform(seed_ptr, samples + row, positions + row, START) * tl.sum(kept, 0)
        last = tl.max(tl.where(kept > 0, number, -1), 0)  # where rounding leaves none above the target
        block = tl.minimum(tl.min(tl.where((kept > 0) & (sums > target), number, NB), 0), last)
        target -= tl.sum(tl.where(number < block, kept, 0.0), 0)
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = _read(logits + row * stride, at, V)
        exists = _kept(x, at < V, least, row, LIMITED)
        weights = tl.where(exists, tl.exp((x - top) * inverse), 0.0)
        exists = weights > 0
        above = exists & (tl.cumsum(weights, 0) > target)
        token = tl.minimum(tl.min(tl.where(above, at, V), 0), tl.max(tl.where(exists, at, -1), 0))
        tl.store(tokens + row, token.to(tl.int64))
        chosen = tl.load(logits + row * stride + token).to(tl.float32) - top
        tl.store(logprobs + row, chosen - tl.log(total))
        tl.store(sampling_logprobs + row, chosen * inverse - tl.log(whole))


@triton.jit
def _uniform(seed_ptr, sample_ptr, position_ptr, START: tl.constexpr):
    """`reference.uniform`."""
    seed, sample, position = tl.load(seed_ptr), tl.load(sample_ptr), tl.load(position_ptr)
    word = _mix(seed.to(tl.uint32) ^ START)
    word = _mix(word ^ (seed >> 32).to(tl.uint32))
    word = _mix(word ^ sample.to(tl.uint32))
    word = _mix(word ^ (sample >> 32).to(tl.uint32))
    word = _mix(word ^ position.to(tl.uint32))
    return ((word >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
