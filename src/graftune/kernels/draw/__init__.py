"""Draws the next token of each sequence from its logits [S, V], computing in fp32; see reference.py for the formulas.

The random number of a draw is a hash of (seed, sample, position): it depends neither on the other sequences nor on the
device. Everything that changes between calls is a tensor on the device, so that a draw can be replayed from a graph;
`mode` selects the kernels and is fixed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graftune.kernels import launch
from graftune.kernels.draw import reference

__all__ = ["GREEDY", "LIMITED", "WHOLE", "DrawSettings", "Drawn", "draw"]

GREEDY, WHOLE, LIMITED = "greedy", "whole", "limited"  # the likeliest token; from all tokens; within top-k and top-p


class DrawSettings(NamedTuple):
    """0-dim tensors on the device of the logits."""

    temperature: torch.Tensor  # fp32, above 0
    top_k: torch.Tensor  # int64; 0: all
    top_p: torch.Tensor  # fp32
    seed: torch.Tensor  # int64

    @staticmethod
    def of(temperature: float, top_k: int, top_p: float, seed: int, device: torch.device | str) -> DrawSettings:
        dtypes = torch.float32, torch.int64, torch.float32, torch.int64
        found = DrawSettings(*(torch.zeros((), dtype=dtype, device=device) for dtype in dtypes))
        found.fill_(temperature, top_k, top_p, seed)
        return found

    def fill_(self, temperature: float, top_k: int, top_p: float, seed: int) -> None:
        for setting, value in zip(self, (temperature or 1.0, top_k, top_p, seed), strict=True):
            setting.fill_(value)


class Drawn(NamedTuple):
    """All [S]."""

    tokens: torch.Tensor  # int64
    logprobs: torch.Tensor  # fp32, of the tokens under the model: temperature 1, no limits
    sampling_logprobs: torch.Tensor  # fp32, at the sampling temperature over the whole vocabulary; greedy: 0


@launch.operation("sampling")
def draw(
    logits: torch.Tensor, mode: str, settings: DrawSettings, samples: torch.Tensor, positions: torch.Tensor
) -> Drawn:
    """`samples` and `positions` [S] (int64): the number of each sample, and of the token in its sequence."""
    assert logits.stride(1) == 1 and mode in (GREEDY, WHOLE, LIMITED)
    assert samples.shape == positions.shape == logits.shape[:1] and logits.shape[1] < 2**31
    return Drawn(*launch.implementation(reference, logits).draw(logits, mode, settings, samples, positions))
