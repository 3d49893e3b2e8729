"""KTO (Ethayarajh et al. 2024): answers that are rated desirable or undesirable, one at a time, without pairs.

With r(y) = log p(y) - log p_ref(y), summed over the answer's tokens:

    desirable    w_d (1 - sigmoid(beta (r(y) - KL)))
    undesirable  w_u (1 - sigmoid(beta (KL - r(y))))

The mean is over the answers of the optimizer step. `kto_zero` takes KL as 0 and needs no further pass.

KL is what r is on average for answers to other prompts, at least 0, and has no gradient. It is estimated over all
answers of the optimizer step, each with the prompt of the next one, in forward passes before the step's micro-batches
(`BatchLayout.ahead`). So it does not depend on how the step is divided into micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch

from graftune.batch import Ahead, BatchLayout, Example, Field, PackedBatch
from graftune.data.encoded import lengths_of, numbers_of
from graftune.data.kind import DataKind
from graftune.data.pack import targets_of
from graftune.data.pairs import RATED
from graftune.losses.answers import FIELDS, answers_of, one_each
from graftune.losses.interface import LogProbLoss


class KtoZero(LogProbLoss):
    """KTO with a KL of 0. Figures: the mean reward of desirable (chosen) and undesirable (rejected) answers, each over
    their own number, and the difference (margin). In a step that has none of them the figure is not a number."""

    figures: tuple[str, ...] = ("chosen", "rejected", "margin")
    better: Mapping[str, Literal["higher", "lower"]] = {"margin": "higher"}
    data: DataKind = RATED
    reference_per = "document"

    def __init__(
        self,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        reference: Literal["base", "start"] = "base",
    ):
        self.beta, self.reference = beta, reference
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight

    def fields_of(self, examples: Sequence[Example]) -> BatchLayout:
        return BatchLayout(fields=(*FIELDS, _LABEL), shares=one_each)

    def kl(self, batch: PackedBatch) -> torch.Tensor | float:
        return 0.0

    @property
    def sums(self) -> int:
        return 5  # rewards of desirable answers, of undesirable ones; the number of each; KL for every answer

    def means(self, sums: torch.Tensor, divisor: torch.Tensor | float) -> torch.Tensor:
        chosen, rejected = sums[0] / sums[2], sums[1] / sums[3]
        return torch.stack((chosen, rejected, chosen - rejected, sums[4] / divisor)[: len(self.figures)])

    def of_log_probs(
        self, log_probs: torch.Tensor, reference: torch.Tensor | None, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        answers, kl = answers_of(log_probs, reference, batch), self.kl(batch)
        good = batch.extra["label"] * answers.real
        bad = answers.real - good
        above = self.beta * (answers.log_ratio - kl)
        weighted = self.desirable_weight * good * torch.sigmoid(-above)
        weighted = weighted + self.undesirable_weight * bad * torch.sigmoid(above)
        with torch.no_grad():
            rewards = self.beta * answers.log_ratio
            figures = torch.stack((rewards * good, rewards * bad, good, bad, answers.real * kl)).sum(1)
        return weighted.sum(), figures


class Kto(KtoZero):
    """KTO. `kl` is reported too."""

    figures = ("chosen", "rejected", "margin", "kl")
    ahead = 2  # the sum over mismatched answers, and their number

    def fields_of(self, examples: Sequence[Example]) -> BatchLayout:
        return BatchLayout(fields=(*FIELDS, _LABEL), shares=one_each, ahead=_MISMATCHED)

    def sums_ahead(self, log_probs: torch.Tensor, reference: torch.Tensor | None, batch: PackedBatch) -> torch.Tensor:
        answers = answers_of(log_probs, reference, batch)
        return torch.stack((answers.log_ratio * answers.real, answers.real)).sum(1)

    def kl(self, batch: PackedBatch) -> torch.Tensor:
        total, count = batch.extra["ahead"].unbind()
        return (total / count.clamp(min=1.0)).clamp(min=0.0)


def mismatched(examples: Sequence[Example]) -> list[Example]:
    """Each prompt with the answer of the example before it, the first with the last one's. An answer is everything from
    the first trained token on."""
    held, starts, made = list(examples), answer_starts(examples), []
    for place, (example, start) in enumerate(zip(held, starts, strict=True)):
        other, begin = held[place - 1], starts[place - 1]
        tokens = [*example.tokens[:start], *other.tokens[begin:]]
        supervised = [*example.supervised[:start], *other.supervised[begin:]]
        made.append(Example(tokens, supervised, example.row, numbers=example.numbers))
    return made


def longest_mismatched(examples: Sequence[Example]) -> int:
    """Tokens of the longest prompt with the longest answer."""
    starts, lengths = np.array(answer_starts(examples)), lengths_of(examples)
    return int(starts.max(initial=0) + (lengths - starts).max(initial=0))


def answer_starts(examples: Sequence[Example]) -> list[int]:
    """The place of the first trained token of each example; its length if none is trained."""
    lengths = lengths_of(examples)
    targets, ends = targets_of(examples), np.cumsum(lengths)
    first = np.searchsorted(targets, ends - lengths)
    found = np.append(targets, ends[-1:])[first] if len(ends) else ends
    return (np.minimum(found, ends) - (ends - lengths)).tolist()


_MISMATCHED = Ahead(mismatched, longest_mismatched, FIELDS)
_LABEL = Field("label", torch.float32, partial(numbers_of, name="label", missing=0.0), per="document")
