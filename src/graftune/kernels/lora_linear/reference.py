"""The low-rank product of an adapter, y += s * (x A') B', and its gradients.

    A (down) [R, in]    B (up) [out, R]    h = x A'    g = s * dY B
    dB = s * dY' h      dA = g' x          dX += g A

Projections that read the same x (q, k, v; gate, up) are members of a group. Their A's are stacked by rows, and so are
their B's; member i has the columns h[:, i*R:(i+1)*R] and its own columns of y. So x is read once for the whole group.
On a CPU, the B's are on the diagonal of one [out, R * members] matrix: y and dY are then read once for the group too,
and multiplying the zeros off the diagonal costs less than the calls it saves. s is `scaling` of model/lora.py
(alpha/rank; rsLoRA: alpha/sqrt(rank)). It is never multiplied into the trained B, so that the adapter on disk is the
adapter that trains; only the copies beside a weight on a GPU hold s B (model/projection.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from graftune.kernels import launch


class LowRank(NamedTuple):
    """A group's low-rank product before it is added to y."""

    h: torch.Tensor  # [T, R * members]
    up: torch.Tensor  # [sum of the members' outs, R]: their B's, stacked
    columns: tuple[tuple[int, int], ...]  # each member's columns of y
    scale: float
    diagonal: torch.Tensor | None = None  # [out, R * members], on a CPU: the same B's on a diagonal

    @property
    def rank(self) -> int:
        return self.up.shape[1]

    def members(self) -> list[tuple[slice, slice, slice]]:
        return members(self.columns, self.rank)


def members(columns: Sequence[tuple[int, int]], rank: int) -> list[tuple[slice, slice, slice]]:
    """(columns of y, rows of the stacked B's, columns of h) of each member of a group."""
    found, row = [], 0
    for index, (start, stop) in enumerate(columns):
        rows = slice(row, row + stop - start)
        found.append((slice(start, stop), rows, slice(index * rank, (index + 1) * rank)))
        row = rows.stop
    return found


class Copy(NamedTuple):
    """A part of the arena (`source`) and the place where matrix products read it (`target`)."""

    source: torch.Tensor
    target: torch.Tensor
    scale: float


def spread(copies: Sequence[Copy], tables: dict[str, torch.Tensor]) -> None:
    """target = scale * source for each copy."""
    for source, target, scale in copies:
        torch.mul(source, scale, out=target) if scale != 1.0 else target.copy_(source)


@launch.operation("adapters")
def add_(y: torch.Tensor, low: LowRank) -> torch.Tensor:
    """y [T, out] += s * h B', in place."""
    if low.diagonal is not None:
        return y.addmm_(low.h, low.diagonal.t(), alpha=low.scale)
    for columns, rows, ranks in low.members():
        y[:, columns].addmm_(low.h[:, ranks], low.up[rows].t(), alpha=low.scale)
    return y


@launch.operation("adapters")
def add_input_grad_(grad_x: torch.Tensor, g: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """grad_x [T, in] += g A."""
    return grad_x.addmm_(g, down)


def up_backward(grad_y: torch.Tensor, low: LowRank) -> torch.Tensor:
    """g = s dY B, [T, R * members]."""
    if low.diagonal is not None:
        return (grad_y @ low.diagonal).mul_(low.scale)
    g = torch.empty_like(low.h)
    for columns, rows, ranks in low.members():
        torch.mm(grad_y[:, columns], low.up[rows], out=g[:, ranks])
    return g.mul_(low.scale)


def up_grad(grad_y: torch.Tensor, low: LowRank, grad_up: torch.Tensor) -> None:
    """Add dB = s dY' h to `grad_up` [sum of outs, R] (fp32)."""
    joint = low.h.t() @ grad_y if low.diagonal is not None else None  # only its diagonal blocks are used
    for columns, rows, ranks in low.members():
        if joint is not None:
            grad_up[rows].add_(joint[ranks, columns].t(), alpha=low.scale)
        else:
            add_product_(grad_up[rows], grad_y[:, columns].t(), low.h[:, ranks], low.scale)


def down_backward(g: torch.Tensor, x: torch.Tensor, grad_down: torch.Tensor) -> None:
    """Add dA = g' x to `grad_down` [R * members, in] (fp32)."""
    add_product_(grad_down, g.t(), x)


def add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> None:
    """total (fp32) += scale * a b for any dtype of a and b. On a GPU the product is summed in fp32 throughout."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, alpha=scale)
    elif launch.on_gpu(a):
        torch.addmm(total, a, b, out_dtype=torch.float32, alpha=scale, out=total)
    else:
        total.add_(a @ b, alpha=scale)
