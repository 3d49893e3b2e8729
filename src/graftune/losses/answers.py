"""Sums over whole answers, from the log-probabilities of their tokens: the inputs of preference losses.

An answer is a document of the packed batch. Its rows are summed by `index_add` into one number per document, in fixed
shapes; documents that are padding have no trained tokens. Nothing is divided by the number of tokens unless a loss says
so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from graftune.batch import Example, Field, PackedBatch
from graftune.data.encoded import lengths_of, responses_of


class Answers(NamedTuple):
    """One number per answer [A]."""

    log_p: torch.Tensor  # log p of the whole answer
    log_ratio: torch.Tensor  # log p less the reference model's; log p itself if the loss has no reference
    tokens: torch.Tensor  # trained tokens, fp32, at least 1
    real: torch.Tensor  # fp32: 1, and 0 where the document is padding

    @property
    def per_token(self) -> torch.Tensor:
        """The mean log p of a token."""
        return self.log_p / self.tokens

    @property
    def log_ratio_per_token(self) -> torch.Tensor:
        return self.log_ratio / self.tokens

    def member(self, place: int) -> Answers:
        """The first (0) or the second (1) answer of each pair."""
        pairs = len(self.tokens) // 2
        return Answers(*(value[: 2 * pairs].view(pairs, 2)[:, place] for value in self))


def answers_of(log_probs: torch.Tensor, reference: torch.Tensor | None, batch: PackedBatch) -> Answers:
    """log p(label) [R] of the model, and log p of each answer [A] of the reference model -> sums over answers."""
    trained, log_p = batch.extra["trained"], per_answer(log_probs, batch)
    log_ratio = log_p if reference is None else log_p - reference
    return Answers(log_p.float(), log_ratio.float(), trained.clamp(min=1.0), (trained > 0).float())


def per_answer(log_probs: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """The sum over each answer [A] of a number per label [R]. It is fp64, since two large sums are subtracted from each
    other: in fp32 a small log ratio of long answers would be rounding alone."""
    sums = torch.zeros_like(batch.extra["trained"], dtype=torch.float64)
    return sums.index_add(0, batch.extra["document"], log_probs.double())


def _document_of_each_token(held: Sequence[Example]) -> np.ndarray:
    return np.repeat(np.arange(len(held)), lengths_of(held))


# Shares of a loss that is divided by the number of answers, or of pairs. Functions of the module, so that layouts of
# equal losses are equal.
def one_each(held: Sequence[Example]) -> np.ndarray:
    return np.ones(len(held))


def half_each(held: Sequence[Example]) -> np.ndarray:
    return np.full(len(held), 0.5)


FIELDS = (  # those that `answers_of` reads
    Field("document", torch.int64, _document_of_each_token),
    Field("trained", torch.float32, responses_of, per="document"),
)
