"""Drawing tokens: the seed decides, the limits hold, and frequencies are those of the distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftune.errors import GraftuneError
from graftune.infer.sample import Sampling, choose
from tests.support import oracle
from tests.support.generate import generate

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


@pytest.fixture(scope="module")
def ours(tiny_folder: Any) -> oracle.Ours:
    return oracle.ours(tiny_folder("qwen2"), random_b=False)


def frequencies(draws: int = 20_000, **settings: Any) -> torch.Tensor:
    """How often each token of LOGITS is drawn."""
    rows = LOGITS.expand(draws, -1).clone()
    chosen = choose(rows, Sampling(**settings), torch.Generator().manual_seed(0))
    return torch.bincount(chosen, minlength=len(LOGITS)) / draws


def test_the_seed_decides(ours: oracle.Ours) -> None:
    def text(seed: int) -> list[list[int]]:
        wild = Sampling(max_new_tokens=12, temperature=1.5, top_p=0.95, seed=seed)
        return generate(ours.decoder, [[5, 9], [77]], wild, ())

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_the_most_likely_only_is_greedy(ours: oracle.Ours) -> None:
    prompts = [[5, 9], [77]]
    greedy = generate(ours.decoder, prompts, Sampling(max_new_tokens=12), ())
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        drawn = Sampling(max_new_tokens=12, temperature=1.3, seed=4, **narrow)
        assert generate(ours.decoder, prompts, drawn, ()) == greedy


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature: float) -> None:
    want = torch.softmax(LOGITS / temperature, -1)
    assert (frequencies(temperature=temperature) - want).abs().max() < 0.015


def test_top_k() -> None:
    want = torch.softmax(LOGITS[:3], -1)
    got = frequencies(temperature=1.0, top_k=3)
    assert (got[:3] - want).abs().max() < 0.015 and got[3:].sum() == 0
    assert frequencies(temperature=1.0, top_k=100)[5] > 0, "more than there are: all"


def test_top_p_keeps_the_token_that_crosses_the_line() -> None:
    # Probabilities 0.56, 0.21, 0.12, ...: the first alone is short of 0.6, the first two are past it.
    want = torch.softmax(LOGITS[:2], -1)
    got = frequencies(temperature=1.0, top_p=0.6)
    assert (got[:2] - want).abs().max() < 0.015 and got[2:].sum() == 0
    assert frequencies(temperature=1.0, top_p=0.5)[0] == 1


def test_both_limits_and_unsorted_logits() -> None:
    rows = LOGITS.flip(0).expand(5000, -1).clone()
    chosen = choose(rows, Sampling(temperature=1.0, top_k=3, top_p=0.9), torch.Generator().manual_seed(0))
    assert set(chosen.tolist()) == {3, 4, 5}


def test_choosing_leaves_the_logits_alone() -> None:
    rows = LOGITS.expand(3, -1).clone()
    choose(rows, Sampling(temperature=1.0, top_k=2, top_p=0.5), torch.Generator())
    assert rows.equal(LOGITS.expand(3, -1))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, r"top_p is 0\.0"),
        ({"top_p": 1.5}, r"top_p is 1\.5"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(GraftuneError, match=named):
        Sampling(**settings)
