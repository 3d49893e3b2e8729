"""8-bit codes chosen by what the weight will be multiplied with, instead of each to its nearest.

A row w of the weight is held as codes times a scale, and is off by e = w - codes * scale. What that costs over the
tokens x of a sample is the sum of (x . e)^2 = e H e', with H = X'X. With H = L L' (L lower triangular)

    e H e'  =  |e L|^2  =  sum over k of L_kk^2 (e_k + sum over j > k of e_j L_jk / L_kk)^2

so columns are taken from the last to the first, and each is rounded to the code nearest to w_k plus what those before
it left over along L: the error of one column is made good by the next. Columns that carry most go first, while all
others can still answer for them. It is GPTQ's rule (Frantar et al., 2022), in the form of Chee et al. (2023), which
needs one factor of H and no inverse. Over a sample without correlations it is rounding to nearest.

e4m3's steps double from octave to octave, so between a scale and its double lie other roundings of the same row. A few
are tried, each value to its nearest, with columns counting by H's diagonal. (By the formula they count by L_kk^2; that
measured no better: docs/lessons.md.)

H is damped by a share of its mean diagonal, which counts the error of every value for itself beside what the sample
says of it: other tokens will come, and dX = dY W reads the weight across its rows. A tenth costs the sample's own error
6% and brings that of single values from 1.3 to 1.1 of rounding to nearest (SmolLM2). A channel that was always zero is
rounded to nearest.

Everything is in fp32 and in units of the row's scale, transposed: [in, rows], so that a column of the weight is
contiguous. A block of columns is corrected for all before it by one product; inside it a column takes five launches,
whatever the number of rows, which is why all rows of a weight go together (up to ROWS_BYTES).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graftune.errors import GraftuneError
from graftune.kernels.fp8 import E4M3, LARGEST

DAMPING = 0.1
BLOCK = 128  # columns
ROWS_BYTES = 512 << 20  # of a weight in fp32 that exist at once
SAMPLE_BYTES = 128 << 20  # of a sample in fp32
SCALES = (1.0, 1.09, 1.19, 1.3, 1.41, 1.54, 1.68, 1.83)  # times the least that holds the row


class Factor(NamedTuple):
    """H as the rounding wants it: its columns in their order, the last of which is rounded first."""

    columns: torch.Tensor  # [in], which column of the weight is where
    diagonal: torch.Tensor  # [in], of H
    feedback: torch.Tensor  # [in, in], L_jk / L_kk


class Sample:
    """What a weight was multiplied with, as H."""

    def __init__(self, width: int, device: torch.device):
        self.width = width
        self.sums: torch.Tensor | None = torch.zeros(width, width, dtype=torch.float32, device=device)

    def add(self, x: torch.Tensor) -> None:
        """x [T, in]."""
        assert self.sums is not None, "it was factored already"
        for part in x.split(max(1, SAMPLE_BYTES // (4 * self.width))):
            wide = part.float()
            self.sums.addmm_(wide.t(), wide)

    def factor(self) -> Factor:
        """Uses the sums up: at most two matrices of their size exist."""
        assert self.sums is not None, "it was factored already"
        diagonal = self.sums.diagonal()
        diagonal.add_(DAMPING * diagonal.mean())
        diagonal.add_(diagonal == 0)  # where there was nothing but zeros
        columns = diagonal.argsort(stable=True)
        # Not by both at once: on CUDA torch would then write out both indices for every value, four times the sums.
        ordered = self.sums.index_select(0, columns)
        self.sums = None
        del diagonal
        ordered = ordered.index_select(1, columns)
        damped = ordered.diagonal().clone()
        factor, failed = torch.linalg.cholesky_ex(ordered)
        del ordered
        diagonal = factor.diagonal().clone()
        if not bool((failed == 0).all() & diagonal.isfinite().all()):  # NaN goes through some libraries unseen
            raise GraftuneError(
                "the base makes values of the training data that are not finite",
                mend="check the base with `graftune eval`, or set calibrate to false",
            )
        return Factor(columns, damped, factor.div_(diagonal))


def scales(rows: torch.Tensor, least: torch.Tensor, factor: Factor) -> torch.Tensor:
    """rows [n, in] in the factor's order, the least scale [n] that holds each -> that at which rounding costs least.
    Nothing is beyond 448 but by the last bit of a division, and what is below 464 still becomes 448."""
    best, found = torch.full_like(least, torch.inf), least
    for times in SCALES:
        scale = least * times
        units = rows * scale.reciprocal().unsqueeze(1)
        cost = units.sub_(units.to(E4M3).float()).square_() @ factor.diagonal * scale.square()
        found = torch.where(cost < best, scale, found)
        best = torch.minimum(cost, best)
    return found


def round_(units: torch.Tensor, factor: Factor, weight: torch.Tensor) -> None:
    """units [in, rows], in the factor's order, become what is left over; their codes go to weight [rows, in]."""
    width, rows = units.shape
    codes = torch.empty(min(BLOCK, width), rows, dtype=E4M3, device=units.device)
    held = torch.empty(rows, dtype=torch.float32, device=units.device)
    for start, stop in blocks(width):
        own, left = units[start:stop], units[stop:]
        feedback = factor.feedback[:, start:stop]
        aim = torch.addmm(own, feedback[stop:].t(), left) if stop < width else own.clone()
        round_block_(own, aim, feedback[start:stop], codes, held)
        made = codes[: stop - start].view(torch.uint8).t()
        weight.view(torch.uint8).index_copy_(1, factor.columns[start:stop], made)


def blocks(width: int) -> list[tuple[int, int]]:
    """From the last to the first."""
    return [(max(0, stop - BLOCK), stop) for stop in range(width, 0, -BLOCK)]


def round_block_(
    own: torch.Tensor, aim: torch.Tensor, feedback: torch.Tensor, codes: torch.Tensor, held: torch.Tensor
) -> None:
    """own [n, rows] become what is left over; aim: own, and what columns before the block left. Allocates nothing."""
    for k in reversed(range(len(own))):
        meant = aim[k].addmv_(own[k + 1 :].t(), feedback[k + 1 :, k])
        codes[k].copy_(meant.clamp_(-LARGEST, LARGEST))
        own[k].sub_(held.copy_(codes[k]))
