"""Quantises to MXFP4: floats of four bits (0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign) times a power of two for each 32.

The power that puts the largest value between 4 and 8 cuts off what is above 6; the next one keeps it and is coarser.
Both are tried, and the one with the smaller squared error is taken; llama.cpp always takes the first. Values that were
MXFP4 before come back to the bit, since the first power then has no error.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from graftune.kernels.gguf_dequant.reference import FP4
from graftune.weights.gguf_quant import pack

_LEVELS = FP4[:8]
_BORDERS = [(a + b) / 2 for a, b in pairwise(_LEVELS)]
_SIGN = 8  # in a code
_ZERO = 128  # the exponent byte at which the levels of FP4, which are doubled, are the values
_LEAST, _MOST = -126, 124  # 2^126 is still a number, and so is the largest level times 2^125


def parts(x: torch.Tensor) -> pack.Parts:
    """x [n, 32] -> the exponent byte and the codes' bytes, [n, 1] and [n, 16]."""
    largest = x.abs().amax(1)
    exponent = torch.frexp(largest).exponent.sub_(4).clamp_(_LEAST, _MOST)  # the largest is 8 to 16 times 2^exponent
    codes, error = _nearest(x, exponent)
    coarser, with_coarser = _nearest(x, exponent + 1)
    better = 4 * with_coarser < error
    exponent = exponent.add_(better).add_(_ZERO).to(torch.uint8)
    return [exponent[:, None], pack.fields(torch.where(better[:, None], coarser, codes), 16, 4)]


def _nearest(x: torch.Tensor, exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of the levels that are nearest to x / 2^exponent, and their squared error over each block."""
    scaled = torch.ldexp(x, -exponent[:, None])
    size = scaled.abs()
    codes = torch.bucketize(size, torch.tensor(_BORDERS))
    error = size.sub_(torch.tensor(_LEVELS, dtype=torch.float32)[codes]).square_().sum(1)
    return codes.to(torch.uint8).add_(scaled.signbit() & (codes > 0), alpha=_SIGN), error
