"""Numbers that ranks sum together with the gradients: they follow the gradients in the arena's buffer.

    loss          the sum of the step's losses
    tokens        the number of its response tokens, as counted on the device
    stop          the number of ranks that want to stop; every rank sees it in the report of the same step
    fingerprint   of the weights, in eight pieces of eight bits
    figures       the loss's own figures

If all ranks have equal fingerprints, the sum equals one rank's fingerprint times the number of ranks, exactly even in
fp32, since no piece exceeds 255. So replicas that drift apart are noticed without another collective and without a
wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

PIECES, BITS = 8, 8
CONTROL_FLAGS = 1 + PIECES  # stop request, then the fingerprint
_FLAGS_START = 2  # the loss sum and the token sum come first
_FIGURES = _FLAGS_START + CONTROL_FLAGS
PART = 1 << 22  # weights summed at once: a CPU makes an int64 copy of them


class Reduce(Protocol):
    """Sums a flat buffer over `size` ranks. `captured`: a CUDA graph can capture the call."""

    size: int

    @property
    def captured(self) -> bool: ...
    def add_up(self, sums: torch.Tensor) -> None: ...


class RankSignals(NamedTuple):
    """Reduced over ranks: stop requests, weight mismatches."""

    stop: bool = False
    differ: bool = False


class Tail:
    """Views of `tail`, the numbers after the gradients. `own_flags`: this rank's control flags, on the device."""

    def __init__(self, tail: torch.Tensor, own_flags: torch.Tensor, figures: int):
        assert _FIGURES + figures <= len(tail) and own_flags.shape == (CONTROL_FLAGS,)
        self.loss_sum, self.token_sum, self.figure_sums = tail[0], tail[1], tail[_FIGURES : _FIGURES + figures]
        self.summed_flags, self.own_flags = tail[_FLAGS_START:_FIGURES], own_flags
        self.shifts = torch.arange(0, PIECES * BITS, BITS, device=tail.device)

    def zero(self) -> None:
        self.loss_sum.zero_()
        self.token_sum.zero_()
        self.figure_sums.zero_()

    def fill(self) -> None:
        """Put this rank's flags where the collective sums them."""
        self.summed_flags.copy_(self.own_flags)

    def report(self, out: torch.Tensor) -> None:
        """Copy the summed flags, then this rank's own, to the end of the step's report."""
        out[:CONTROL_FLAGS].copy_(self.summed_flags)
        out[CONTROL_FLAGS:].copy_(self.own_flags)

    def fingerprint(self, weights: torch.Tensor) -> None:
        self.own_flags[1:].copy_((bit_sum(weights) >> self.shifts) & (2**BITS - 1))


def bit_sum(weights: torch.Tensor) -> torch.Tensor:
    """The sum of fp32 weights' bits, which does not depend on the order: 0-dim int64 on their device."""
    total = torch.zeros((), dtype=torch.int64, device=weights.device)
    for part in weights.view(torch.int32).split(PART):
        total += part.sum(dtype=torch.int64)
    return total


def signals(report: Sequence[Any], size: int) -> RankSignals:
    """Read the flags that `Tail.report` wrote, after the report was fetched."""
    summed, own = report[:CONTROL_FLAGS], report[CONTROL_FLAGS:]
    differ = any(total != size * flag for total, flag in zip(summed[1:], own[1:], strict=True))
    return RankSignals(summed[0] > 0, differ)
