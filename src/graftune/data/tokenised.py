"""Examples that the caller has tokenised: a mapping each, with numbers per token.

    {"tokens": [...], "mask": [...], "advantages": [...], "logprobs": [...]}

All lists are as long as `tokens`, and the number at a place belongs to the token at that place: `logprobs[i]` is the
log-probability of `tokens[i]` after those before it. `mask` says which tokens are trained; `weights` multiply the loss
of each, and a token of weight 0 is not trained. Without either, all tokens are trained but the first, which has nothing
before it. `group` is the number of the example's group. Every other key is for the loss to read: one number, or one per
token. Nothing is shortened or left out: an example that cannot be used is refused with its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graftune.batch import Example
from graftune.data.kind import DataKind
from graftune.errors import GraftuneError


class SampledKind(DataKind):
    """Answers that a model has sampled, as tokens; files of text hold none."""

    def refusal_of_all(self, row: dict[str, Any]) -> GraftuneError | None:
        return GraftuneError(
            "holds text, and this loss takes tokenised answers with their advantages and sampled log-probabilities",
            fix="give those to session.forward_backward in a loop of your own, or set another loss",
        )


SAMPLED = SampledKind("sampled answers")


def is_tokenised(data: object) -> bool:
    """Whether these are tokenised examples, judged by the first."""
    first = data[0] if isinstance(data, Sequence) and not isinstance(data, str) and len(data) else None
    return isinstance(first, Example) or (isinstance(first, Mapping) and "tokens" in first)


def examples_of(given: Sequence[Any], vocabulary: int, longest: int) -> list[Example]:
    """Checked examples. `longest`: tokens that one may have."""
    return [_example(one, f"example {number}", vocabulary, longest) for number, one in enumerate(given, 1)]


def _example(given: Any, name: str, vocabulary: int, longest: int) -> Example:
    if isinstance(given, Example):
        fields = {"tokens": given.tokens, "mask": given.supervised, "group": given.group, **given.numbers}
        given = fields if given.weights is None else fields | {"weights": given.weights}
    if not isinstance(given, Mapping) or "tokens" not in given:
        raise GraftuneError(f"{name} has no tokens", fix="give each example a list of token numbers as `tokens`")
    tokens = _numbers(given["tokens"], name, "tokens")
    if tokens.ndim != 1 or not len(tokens) or (tokens != np.floor(tokens)).any():
        raise GraftuneError(f"{name}: tokens are not a list of whole numbers", fix="give at least one token")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise GraftuneError(
            f"{name} has a token outside the vocabulary of {vocabulary}", fix="encode with session.tokenizer"
        )
    if len(tokens) > longest:
        raise GraftuneError(
            f"{name} has {len(tokens)} tokens and max_seq_len is {longest}", fix="raise max_seq_len, or shorten it"
        )
    named = {key: _numbers(value, name, key) for key, value in given.items() if key not in ("tokens", "group")}
    for key, value in named.items():
        if value.shape not in ((), tokens.shape) or (key in ("mask", "weights") and not value.ndim):
            raise GraftuneError(
                f"{name}: {key} has {value.size} numbers and there are {len(tokens)} tokens",
                fix="give one number per token, also for tokens that are not trained",
            )
    weights, mask = named.pop("weights", None), named.pop("mask", None)
    trained = np.ones(len(tokens), bool) if mask is None else mask != 0
    if weights is not None:
        trained &= weights != 0
        weights = None if (weights[trained] == 1).all() else weights
    return Example(
        tokens.astype(np.int64).tolist(),
        trained.tolist(),
        weights=None if weights is None else weights.tolist(),
        group=int(given.get("group", -1)),
        numbers={key: value.tolist() for key, value in named.items()},
    )


def _numbers(value: Any, name: str, key: str) -> np.ndarray:
    """A list, an array or a tensor on any device, as float64, which holds every token number."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    try:
        found = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.asarray(np.nan)
    if not np.isfinite(found).all():
        raise GraftuneError(
            f"{name}: {key} contains a value that is not a finite number", fix="give a list of finite numbers"
        )
    return found
