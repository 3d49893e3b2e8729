"""Losses of preference pairs: functions of the log-probabilities of a chosen and a rejected answer to one prompt.

Each class has one formula. With r(y) = log p(y) - log p_ref(y), summed over the answer's tokens, |y| its tokens and
m = beta (r(chosen) - r(rejected)):

    dpo       -log sigmoid(m)                                    Rafailov et al. 2023
    dpo_norm  -log sigmoid(beta (r(c)/|c| - r(r)/|r|))           per token, so that length does not pay
    ipo       (r(c)/|c| - r(r)/|r| - 1/(2 beta))^2               Azar et al. 2023
    hinge     max(0, 1 - m)                                      SLiC; Zhao et al. 2023
    robust    (-(1-e) log sigmoid(m) + e log sigmoid(-m)) / (1-2e)    a share e of the pairs is wrong; Chowdhury 2024
    apo_zero  1 - sigmoid(beta r(c)) + sigmoid(beta r(r))        D'Oosterlinck et al. 2024
    simpo     -log sigmoid(beta (log p(c)/|c| - log p(r)/|r|) - gamma)    no reference; Meng et al. 2024
    orpo      -log p(c)/|c| - beta log sigmoid(log odds(c) - log odds(r))  no reference; odds of the mean log p

The mean is over the pairs of the optimizer step. `sft_share` adds that share of -log p(c)/|c|, a mean per answer and
not per token of the batch, so that it does not depend on how a step is divided into micro-batches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from graftune.batch import BatchLayout, Example, PackedBatch
from graftune.data.kind import DataKind
from graftune.data.pairs import PAIRS
from graftune.losses.answers import FIELDS, Answers, answers_of, half_each
from graftune.losses.interface import LogProbLoss

Reference = Literal["", "base", "start"]
NEAR_ONE = -1e-6  # the largest mean log p whose odds are computed: at 0 they are infinite


class PairLoss(LogProbLoss):
    """A loss of pairs, the chosen answer first. Figures: the rewards of chosen and rejected answers, their difference
    (margin), how often it is above 0 (accuracy), and how often the model itself gives the chosen answer the larger
    log p per token (prefers)."""

    figures = ("chosen", "rejected", "margin", "accuracy", "prefers")
    better: Mapping[str, Literal["higher", "lower"]] = {"margin": "higher", "accuracy": "higher", "prefers": "higher"}
    data: DataKind = PAIRS
    reference_per = "document"

    def __init__(self, beta: float = 0.1, sft_share: float = 0.0, reference: Reference = "base"):
        self.beta, self.sft_share, self.reference = beta, sft_share, reference

    def fields_of(self, examples: Sequence[Example]) -> BatchLayout:
        return BatchLayout(fields=FIELDS, shares=half_each)

    @abstractmethod
    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        """The loss of each pair [P], without the SFT share. Finite for padding, whose sums are 0."""

    def reward(self, answers: Answers) -> torch.Tensor:
        return self.beta * answers.log_ratio

    def of_log_probs(
        self, log_probs: torch.Tensor, reference: torch.Tensor | None, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        answers = answers_of(log_probs, reference, batch)
        chosen, rejected = answers.member(0), answers.member(1)
        losses = self.of_pairs(chosen, rejected)
        if self.sft_share:
            losses = losses - self.sft_share * chosen.per_token
        with torch.no_grad():
            rewards = self.reward(chosen), self.reward(rejected)
            margin, prefers = rewards[0] - rewards[1], chosen.per_token > rejected.per_token
            figures = torch.stack((*rewards, margin, (margin > 0).float(), prefers.float())) * chosen.real
        return (losses * chosen.real).sum(), figures.sum(1)


class Dpo(PairLoss):
    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        return -F.logsigmoid(self.beta * (chosen.log_ratio - rejected.log_ratio))


class DpoNorm(PairLoss):
    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        return -F.logsigmoid(self.beta * (chosen.log_ratio_per_token - rejected.log_ratio_per_token))


class Ipo(PairLoss):
    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        return (chosen.log_ratio_per_token - rejected.log_ratio_per_token - 0.5 / self.beta).square()


class Hinge(PairLoss):
    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        return torch.relu(1 - self.beta * (chosen.log_ratio - rejected.log_ratio))


class Robust(PairLoss):
    def __init__(
        self, beta: float = 0.1, sft_share: float = 0.0, reference: Reference = "base", label_smoothing: float = 0.1
    ):
        super().__init__(beta, sft_share, reference)
        self.label_smoothing = label_smoothing

    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        margin, wrong = self.beta * (chosen.log_ratio - rejected.log_ratio), self.label_smoothing
        return (wrong * F.logsigmoid(-margin) - (1 - wrong) * F.logsigmoid(margin)) / (1 - 2 * wrong)


class ApoZero(PairLoss):
    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        return torch.sigmoid(-self.beta * chosen.log_ratio) + torch.sigmoid(self.beta * rejected.log_ratio)


class SimPo(PairLoss):
    def __init__(self, beta: float = 2.5, sft_share: float = 0.0, gamma: float = 1.375):
        super().__init__(beta, sft_share, reference="")
        self.gamma = gamma

    def reward(self, answers: Answers) -> torch.Tensor:
        return self.beta * answers.per_token

    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        return -F.logsigmoid(self.reward(chosen) - self.reward(rejected) - self.gamma)


class Orpo(PairLoss):
    def __init__(self, beta: float = 0.1):
        super().__init__(beta, reference="")

    def reward(self, answers: Answers) -> torch.Tensor:
        return self.beta * answers.per_token

    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        ratio = _log_odds(chosen.per_token) - _log_odds(rejected.per_token)
        return -chosen.per_token - self.beta * F.logsigmoid(ratio)


def _log_odds(log_p: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p))"""
    below_one = log_p.clamp(max=NEAR_ONE)
    return below_one - torch.log(-torch.expm1(below_one))
