"""Policy-gradient losses: functions of the log-probabilities of sampled tokens, of their advantages A and of the
log-probabilities `logprobs` with which they were sampled.

With r = exp(log p - logprobs) of each token, or of a whole answer the exponential of the mean over its tokens (`ratios:
sequence`; GSPO, Zheng et al. 2025):

    importance_sampling  -r A
    ppo                  -min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A)    Schulman et al. 2017; two limits: DAPO
    cispo                -min(r, 1 + clip_high) A log p, r taken as a constant    MiniMax 2025

`kl` adds that factor times exp(d) - d - 1 for d = log p_ref - log p, an estimate of the KL divergence from the
reference model that is never negative. The sum over tokens is divided by the tokens of the optimizer step (`divide:
tokens`; DAPO); or the sum of the answers' means by the number of answers (`answers`; GRPO); or the sum over tokens by
the number of answers times a constant (`constant`; Dr. GRPO). The caller chooses baseline and scale of the advantages.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch

from graftune.batch import BatchLayout, Example, Field, PackedBatch
from graftune.data.kind import DataKind
from graftune.data.tokenised import SAMPLED
from graftune.errors import GraftuneError
from graftune.losses.answers import FIELDS, one_each
from graftune.losses.interface import LogProbLoss

REQUIRED = ("advantages", "logprobs")


class PolicyLoss(LogProbLoss):
    """A loss of sampled answers. Figures, means over the trained tokens: r (ratio), the share of tokens whose r is
    limited (clipped), -log p as an estimate of the entropy, |log p - logprobs| (difference), and the estimate of the KL
    divergence from the reference, if `kl` is not 0."""

    clips = True
    data: DataKind = SAMPLED

    def __init__(
        self,
        divide: Literal["tokens", "answers", "constant"] = "tokens",
        divide_by: float = 256.0,
        ratios: Literal["token", "sequence"] = "token",
        temperature: float = 1.0,
        kl: float = 0.0,
        reference: Literal["base", "start"] = "base",
    ):
        self.divide, self.divide_by, self.ratios, self.temperature = divide, divide_by, ratios, temperature
        self.kl = kl
        self.reference = reference if kl else ""
        optional = {"clipped": self.clips, "kl": bool(kl)}
        names = ("ratio", "clipped", "entropy", "difference", "kl")
        self.figures = tuple(name for name in names if optional.get(name, True))

    @abstractmethod
    def of_tokens(
        self, ratio: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of each token [R], and whether its ratio is limited."""

    def fields_of(self, examples: Sequence[Example]) -> BatchLayout:
        for name in REQUIRED:
            missing = next((number for number, one in enumerate(examples, 1) if name not in one.numbers), None)
            if missing is not None:
                raise GraftuneError(
                    f"example {missing} has no {name}, which {type(self).__name__} reads",
                    fix=f"give each example {name}: one number per token",
                )
        per_answer = self.divide == "answers" or self.ratios == "sequence"
        fields = (*(FIELDS if per_answer else ()), _ADVANTAGES, _LOGPROBS)
        return BatchLayout(fields=fields, shares=None if self.divide == "tokens" else one_each)

    @property
    def sums(self) -> int:
        return len(self.figures) + 1  # and the number of tokens

    def means(self, sums: torch.Tensor, divisor: torch.Tensor | float) -> torch.Tensor:
        return sums[:-1] / sums[-1].clamp(min=1.0)

    def of_log_probs(
        self, log_probs: torch.Tensor, reference: torch.Tensor | None, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Rows that are padding have log-probabilities and advantages of 0, so they add nothing.
        advantages, log_ratio = batch.extra["advantages"], log_probs - batch.extra["logprobs"]
        level = log_ratio
        if self.ratios == "sequence":
            sums = torch.zeros_like(batch.extra["trained"]).index_add(0, batch.extra["document"], level)
            level = _per_token(sums, batch) / _tokens(batch)
        ratio = level.exp()
        losses, clipped = self.of_tokens(ratio, log_probs, advantages)
        kl = None
        if reference is not None:
            further = reference - log_probs
            kl = further.exp() - further - 1
            losses = losses + self.kl * kl
        if self.divide != "tokens":
            losses = losses / (_tokens(batch) if self.divide == "answers" else self.divide_by)
        with torch.no_grad():
            real = (batch.labels >= 0).float()
            values = {"ratio": ratio * real, "clipped": clipped * real, "entropy": -log_probs}
            values |= {"difference": log_ratio.abs(), "kl": real if kl is None else kl}
            figures = torch.stack([*(values[name] for name in self.figures), real]).sum(1)
        return losses.sum(), figures


class ImportanceSampling(PolicyLoss):
    clips = False

    def of_tokens(
        self, ratio: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return -ratio * advantages, torch.zeros_like(ratio)


class Ppo(PolicyLoss):
    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.28, **common: object):
        super().__init__(**common)  # type: ignore[arg-type]  # the settings that all of them have
        self.clip_low, self.clip_high = clip_low, clip_high

    def of_tokens(
        self, ratio: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        limited = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -torch.minimum(ratio * advantages, limited * advantages), limited * advantages < ratio * advantages


class Cispo(PolicyLoss):
    def __init__(self, clip_high: float = 4.0, **common: object):
        super().__init__(**common)  # type: ignore[arg-type]
        self.clip_high = clip_high

    def of_tokens(
        self, ratio: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        limited = ratio.detach().clamp(max=1 + self.clip_high)
        return -limited * advantages * log_probs, (ratio > limited) & (advantages > 0)


def _per_token(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """A number per answer -> the number of each token's answer [R]."""
    return values.index_select(0, batch.extra["document"])


def _tokens(batch: PackedBatch) -> torch.Tensor:
    """How many trained tokens each token's answer has [R]."""
    return _per_token(batch.extra["trained"].clamp(min=1.0), batch)


def _numbers(held: Sequence[Example], name: str) -> np.ndarray:
    """One number per token; a single number applies to all tokens of its answer."""
    each = [np.broadcast_to(np.asarray(one.numbers[name], np.float32), len(one.tokens)) for one in held]
    return np.concatenate(each)


_ADVANTAGES = Field("advantages", torch.float32, partial(_numbers, name="advantages"))
_LOGPROBS = Field("logprobs", torch.float32, partial(_numbers, name="logprobs"))
