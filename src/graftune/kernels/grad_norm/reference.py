"""The clip: for each segment, the norm of the mean gradient and the factor for the summed gradient.

    norm = ||g|| / (scale divisor)      factor = min(1, clip / (norm + 1e-6)) / (scale divisor)

One factor contains the divisor (response tokens of the step), the clip and fp16's loss scale, so no pass rescales the
gradient before the update reads it. All numbers stay on the device.

Squares are summed in fp32. A segment's ||g|| (not yet divided, still scaled) must stay below 1.8e19, the root of the
largest fp32 number: a norm of 1e9 per token over 4,096 tokens with the largest loss scale is 2.7e17. Above it the norm
is infinite and the update is skipped, like any other that is not finite.

A skipped update halves the loss scale; INTERVAL good ones in a row double it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graftune.kernels.blocks import BlockTable

LEAST_SCALE, MOST_SCALE = 1.0, 65536.0
INTERVAL = 2000  # good updates in a row after which the scale is doubled


def norms(grads: torch.Tensor, segments: Sequence[Sequence[slice]]) -> torch.Tensor:
    """L2 norm of each segment (a list of slices of the flat gradient), fp32."""
    squares = [torch.stack([grads[part].square().sum() for part in segment]).sum() for segment in segments]
    return torch.stack(squares).sqrt()


def clip_factors(norms: torch.Tensor, divisor: torch.Tensor, clip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(total norm of the mean gradient, factor for each segment). clip 0 means no clipping."""
    mean_norms = norms / divisor
    factors = torch.where(clip > 0, (clip / (mean_norms + 1e-6)).clamp(max=1.0), torch.ones_like(mean_norms))
    return mean_norms.square().sum().sqrt(), factors / divisor


def rescale(state: torch.Tensor, ok: torch.Tensor) -> None:
    """Adjust the loss scale after an update. `state` is [scale, good updates since it last changed]."""
    scale, clean = state.unbind()
    clean = torch.where(ok, clean + 1, 0.0)
    grown = clean >= INTERVAL
    scale = torch.where(ok, torch.where(grown, scale * 2, scale), scale / 2).clamp(LEAST_SCALE, MOST_SCALE)
    state.copy_(torch.stack((scale, torch.where(grown, 0.0, clean))))


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
    segments: list[list[slice]] = [[] for _ in range(table.segments)]
    for piece in table.pieces():
        segments[piece.segment].append(slice(piece.start, piece.stop))
    scale = torch.ones_like(loss_sum) if scaler_state is None else scaler_state[0]
    divisor, limit = row[5], row[6]
    norm, found = clip_factors(norms(grads, [s or [slice(0, 0)] for s in segments]) / scale, divisor, limit)
    factors.copy_(found / scale)
    loss = loss_sum / divisor
    ok.copy_(torch.isfinite(norm) & torch.isfinite(loss))
    count += ok
    torch.stack((loss, norm, (~ok).float()), out=report)
    if scaler_state is not None:
        rescale(scaler_state, ok)
    loss_sum.zero_()
