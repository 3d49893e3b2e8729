"""Sums over whole answers, from the log-probabilities of their tokens: what preference losses are functions of.

An answer is a document of the packed batch. Its rows are summed by `index_add` into one number per document, in fixed
shapes; documents that are padding have no trained tokens. Nothing is divided by the number of tokens unless a loss says
so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from graftune.batch import Ahead, BatchLayout, Example, Field, PackedBatch
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
    """log p(label) [R] of the model and of the reference model -> sums over answers."""
    trained, document = batch.extra["trained"], batch.extra["document"]
    log_p = torch.zeros_like(trained).index_add(0, document, log_probs)
    log_ratio = log_p if reference is None else torch.zeros_like(trained).index_add(0, document, log_probs - reference)
    return Answers(log_p, log_ratio, trained.clamp(min=1.0), (trained > 0).float())


def layout_of(members: int, *fields: Field, ahead: Ahead | None = None) -> BatchLayout:
    """The fields that `answers_of` reads, and others; the divisor counts groups of `members` answers."""
    return BatchLayout(fields=(*FIELDS, *fields), shares=_SHARES[members], ahead=ahead)


def _document_of_each_token(held: Sequence[Example]) -> np.ndarray:
    return np.repeat(np.arange(len(held)), lengths_of(held))


def one_each(held: Sequence[Example]) -> np.ndarray:
    return np.ones(len(held))


def _half_each(held: Sequence[Example]) -> np.ndarray:
    return np.full(len(held), 0.5)


# Functions of the module, so that layouts of equal losses are equal.
_SHARES: dict[int, Callable[[Sequence[Example]], np.ndarray]] = {1: one_each, 2: _half_each}
FIELDS = (
    Field("document", torch.int64, _document_of_each_token),
    Field("trained", torch.float32, responses_of, per="document"),
)
