"""The clip in two launches: a sum of squares for each block, then one program that adds them and computes the factors.

Every sum has a fixed order, so the same gradient gives the same bits; atomics would save the second launch but not give
that. The second program is small (at most about 65k sums) and does all scalar work of the update, which as torch
operations would take a dozen launches.
"""

from __future__ import annotations

import torch
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.blocks import BlockTable
from graftune.kernels.grad_norm.reference import INTERVAL, LEAST_SCALE, MOST_SCALE

TILE = 4096
SUMS = 8192  # partial sums that the second program loads at a time


@launch.kernel
def _square_sums(grads, starts, stops, partials, BLOCK: tl.constexpr, TILE: tl.constexpr):
    block = tl.program_id(0)
    start, stop = tl.load(starts + block), tl.load(stops + block)
    at = start // BLOCK * BLOCK + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    if stop - start == BLOCK:
        for tile in tl.static_range(0, BLOCK, TILE):
            g = tl.load(grads + at + tile)
            total += g * g
    else:
        for tile in tl.static_range(0, BLOCK, TILE):
            inside = (at + tile >= start) & (at + tile < stop)
            g = tl.load(grads + at + tile, mask=inside, other=0.0)
            total += g * g
    tl.store(partials + block, tl.sum(total, 0))


@launch.kernel
def _decide(
    partials,
    first,
    row,
    loss_sum,
    count,
    report,
    factors,
    ok,
    state,
    segments,
    longest,
    INTERVAL: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
    MOST_SCALE: tl.constexpr,
    SCALED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SUMS: tl.constexpr,
):
    segment = tl.arange(0, SEGMENTS)
    real = segment < segments
    begin = tl.load(first + segment, mask=real, other=0)[:, None]
    end = tl.load(first + 1 + segment, mask=real, other=0)[:, None]
    column = tl.arange(0, SUMS)[None, :]
    sums = tl.zeros((SEGMENTS, SUMS), tl.float32)
    for k in range(0, longest, SUMS):
        at = begin + k + column
        sums += tl.load(partials + at, mask=at < end, other=0.0)

    divisor, clip = tl.load(row + 5), tl.load(row + 6)
    scale = tl.load(state) if SCALED else 1.0
    norms = tl.sqrt_rn(tl.sum(sums, 1)) / scale / divisor
    norm = tl.sqrt_rn(tl.sum(norms * norms, 0))
    factor = tl.where(clip > 0, clip / (norms + 1e-6), 1.0)
    factor = tl.where(factor > 1.0, 1.0, factor)  # not a minimum: nan stays nan
    tl.store(factors + segment, factor / divisor / scale, mask=real)

    loss = tl.load(loss_sum) / divisor
    good = (tl.abs(norm) < float("inf")) & (tl.abs(loss) < float("inf"))  # a comparison with nan is false
    tl.store(ok, good.to(tl.int8))
    tl.store(count, tl.load(count) + good.to(tl.int64))
    tl.store(report, loss)
    tl.store(report + 1, norm)
    tl.store(report + 2, 1.0 - good.to(tl.float32))
    tl.store(loss_sum, 0.0)
    if SCALED:
        clean = tl.where(good, tl.load(state + 1) + 1.0, 0.0)
        grown = clean >= INTERVAL
        renewed = tl.where(good, tl.where(grown, scale * 2.0, scale), scale * 0.5)
        tl.store(state, tl.minimum(tl.maximum(renewed, LEAST_SCALE), MOST_SCALE))
        tl.store(state + 1, tl.where(grown, 0.0, clean))


def clip(
    grads: torch.Tensor,
    table: BlockTable,
    row: torch.Tensor,
    loss_sum: torch.Tensor,
    count: torch.Tensor,
    report: torch.Tensor,
    factors: torch.Tensor,
    ok: torch.Tensor,
    scaler_state: torch.Tensor | None,
    partials: torch.Tensor,
) -> None:
    if len(table):
        tile = min(TILE, table.block)
        _square_sums[(len(table),)](
            grads, table.starts, table.stops, partials, BLOCK=table.block, TILE=tile, num_warps=4
        )
    rows = launch.power_of_two(table.segments)
    _decide[(1,)](
        partials,
        table.first,
        row,
        loss_sum,
        count,
        report,
        factors,
        ok.view(torch.int8),
        row if scaler_state is None else scaler_state,  # read only where SCALED
        table.segments,
        table.longest,
        INTERVAL=INTERVAL,
        LEAST_SCALE=LEAST_SCALE,
        MOST_SCALE=MOST_SCALE,
        SCALED=scaler_state is not None,
        SEGMENTS=rows,
        SUMS=min(max(SUMS // rows, 16), launch.power_of_two(table.longest, 16)),
        num_warps=16,
    )
