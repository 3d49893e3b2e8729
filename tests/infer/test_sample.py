"""The settings of a call: the seed decides, mistakes are refused. tests/kernels/test_draw_kernel.py draws."""

from __future__ import annotations

from typing import Any

import pytest

from graftune.errors import GraftuneError
from graftune.infer.sample import Sampling
from tests.support import oracle
from tests.support.generate import generate


@pytest.fixture(scope="module")
def ours(tiny_folder: Any) -> oracle.Ours:
    return oracle.ours(tiny_folder("qwen2"), random_b=False)


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
