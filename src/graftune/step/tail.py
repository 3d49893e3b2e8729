"""What ranks add up beside the gradients, in the same collective: it lies behind them in the arena's buffer.

    loss    the sum of the step's losses
    tokens  how many response tokens it was taken over, as counted on the device
    stop    how many ranks want to stop: all of them learn it with the figures of one and the same step
    print   a fingerprint of the weights, in eight pieces of eight bits
    figures the loss's own

A rank's own fingerprint times the number of ranks is the sum exactly where all of them are equal, in fp32 too, since
no piece exceeds 255. So replicas that drift apart are noticed without a collective of their own and without a wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

PIECES, BITS = 8, 8
CONTROL_FLAGS = 1 + PIECES  # stop request, then the fingerprint
_FLAGS_START = 2  # the loss sum and the token sum come first
_FIGURES = _FLAGS_START + CONTROL_FLAGS
PART = 1 << 22  # weights that are added up at once: a CPU makes a copy of them in int64


class Reduce(Protocol):
    """Adds a flat buffer up over `size` ranks; `captured`: as a node of a CUDA graph."""

    size: int
    captured: bool

    def __call__(self, sums: torch.Tensor) -> None: ...


class RankSignals(NamedTuple):
    """What came of it: whether somebody wants to stop, and whether some rank's weights differ."""

    stop: bool = False
    differ: bool = False


class Tail:
    """`tail`: the numbers behind the gradients. `said`: what this rank has to say, on the device."""

    def __init__(self, tail: torch.Tensor, said: torch.Tensor, figures: int):
        assert _FIGURES + figures <= len(tail) and said.shape == (CONTROL_FLAGS,)
        self.loss_sum, self.token_sum, self.figure_sums = tail[0], tail[1], tail[_FIGURES : _FIGURES + figures]
        self.signals, self.said = tail[_FLAGS_START:_FIGURES], said
        self.shifts = torch.arange(0, PIECES * BITS, BITS, device=tail.device)

    def zero(self) -> None:
        self.loss_sum.zero_()
        self.token_sum.zero_()
        self.figure_sums.zero_()

    def fill(self) -> None:
        self.signals.copy_(self.said)

    def report(self, out: torch.Tensor) -> None:
        """Into the end of the step's report: what all said, then what this rank did."""
        out[:CONTROL_FLAGS].copy_(self.signals)
        out[CONTROL_FLAGS:].copy_(self.said)

    def fingerprint(self, weights: torch.Tensor) -> None:
        """Renew it. Nothing is read back."""
        self.said[1:].copy_((bit_sum(weights) >> self.shifts) & (2**BITS - 1))


def bit_sum(weights: torch.Tensor) -> torch.Tensor:
    """The sum of fp32 weights' bits, which has no order: 0-dim int64 on their device."""
    total = torch.zeros((), dtype=torch.int64, device=weights.device)
    for part in weights.view(torch.int32).split(PART):
        total += part.sum(dtype=torch.int64)
    return total


def signals(report: Sequence[Any], size: int) -> RankSignals:
    """From what `Tail.report` left, fetched."""
    all_said, own = report[:CONTROL_FLAGS], report[CONTROL_FLAGS:]
    differ = any(total != size * mine for total, mine in zip(all_said[1:], own[1:], strict=True))
    return RankSignals(all_said[0] > 0, differ)
