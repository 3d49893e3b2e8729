"""Inverse-CDF sampling: the first token t for which the weights of tokens 0 to t exceed u times their sum.

    w = exp(x / temperature - max)      u = hash(seed, sample, position) in (0, 1), 23 bits

top-k keeps the tokens whose logit is at least the k-th largest. Of these, top-p keeps a token if the likelier ones have
less than the share p of the weight; so it always keeps the likeliest. Tokens with equal logits are kept or dropped
together, and a dropped token has no weight. The log-probabilities ignore both limits.

Gumbel noise for every logit was rejected: it takes a hash and two logarithms per logit instead of one hash per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from graftune.kernels.draw import DrawSettings

START = 0x9E3779B9
WORD = 0xFFFFFFFF


def draw(
    logits: torch.Tensor, mode: str, settings: DrawSettings, samples: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = logits.float()
    if mode == "greedy":
        tokens = logits.argmax(-1)
        return tokens, _log_probs(logits, tokens), torch.zeros_like(logits[:, 0])
    scaled = logits / settings.temperature
    weights = torch.exp(scaled - scaled.amax(-1, keepdim=True)).double()
    if mode == "limited":
        weights = weights * (logits >= _least(logits, weights, settings))
    sums = weights.cumsum(-1)
    target = uniform(settings.seed, samples, positions).double() * sums[:, -1]
    tokens = torch.searchsorted(sums, target.unsqueeze(1), right=True).squeeze(1)
    return tokens, _log_probs(logits, tokens), _log_probs(scaled, tokens)


def _log_probs(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return scores.gather(1, tokens.unsqueeze(1)).squeeze(1) - torch.logsumexp(scores, -1)


def _least(logits: torch.Tensor, weights: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """The smallest logit that the limits keep, [S, 1]."""
    vocabulary = logits.shape[1]
    ordered, places = logits.sort(-1, descending=True)
    k = torch.where(settings.top_k > 0, settings.top_k, vocabulary).clamp(max=vocabulary)
    kth = ordered.index_select(1, (k - 1).view(1))
    ordered_weights = weights.gather(1, places) * (ordered >= kth)
    sums = ordered_weights.cumsum(-1)
    before = sums - ordered_weights
    kept = (before < settings.top_p.double() * sums[:, -1:]) & (ordered >= kth)
    return torch.where(kept, ordered, float("inf")).amin(-1, keepdim=True)


def uniform(seed: torch.Tensor, samples: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """fp32 in (0, 1), exact."""
    words = torch.full_like(samples, START)
    for part in (seed & WORD, (seed >> 32) & WORD, samples & WORD, (samples >> 32) & WORD, positions & WORD):
        words = _mix(words ^ part)
    return ((words >> 9).float() + 0.5) * 2.0**-23


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The hash of dropout, on 32-bit words in int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)
