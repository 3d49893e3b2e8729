"""From logits to the next token: greedy, or temperature with top-k and top-p, from a seeded generator."""

from __future__ import annotations

import numbers
from dataclasses import dataclass

import torch

from graftune.errors import GraftuneError


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int = 256
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()  # besides the tokenizer's own

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed"):
            value, real = getattr(self, name), name in ("temperature", "top_p")
            if isinstance(value, bool) or not isinstance(value, numbers.Real if real else numbers.Integral):
                raise GraftuneError(f"{name} is {value!r}", fix=f"it must be a {'' if real else 'whole '}number")
        for name, ok, rule in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature == 0 or self.temperature >= 1e-3, "0 or at least 0.001"),
            ("seed", 0 <= self.seed < 2**63, "at least 0 and below 2**63"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not ok:
                raise GraftuneError(f"{name} is {getattr(self, name)}", fix=f"it must be {rule}")


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> torch.Tensor:
    """[B, V] -> [B]. Drawn on the CPU, so that a seed gives the same text on every device."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    scores = logits.float().cpu() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[1]:
        least = scores.topk(sampling.top_k, -1).values[:, -1:]
        scores.masked_fill_(scores < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, places = scores.sort(-1, descending=True)
        probabilities = torch.softmax(ordered, -1)
        before = probabilities.cumsum(-1) - probabilities  # the most likely token always stays
        ordered.masked_fill_(before >= sampling.top_p, float("-inf"))
        scores = torch.full_like(scores, float("-inf")).scatter(1, places, ordered)
    return torch.multinomial(torch.softmax(scores, -1), 1, generator=generator).squeeze(1).to(logits.device)
