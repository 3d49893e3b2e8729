"""Which backend attention takes: the faster one, remembered for the same card, libraries and shape alone."""

from __future__ import annotations

import pytest
import torch

from graftune.io import user_cache
from graftune.kernels.attention import timing


@pytest.fixture
def choose(monkeypatch, tmp_path):
    """choose(times by backend, ...) -> (who was chosen, who was timed)."""
    monkeypatch.setenv("GRAFTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(timing, "_pass", lambda name, *rest: name)

    def chosen(times: dict[str, float], tokens: int = 512, longest: int = 512, heads=(4, 2, 16)):
        timed = []

        def time(name: str) -> float:
            timed.append(name)
            return times[name]

        monkeypatch.setattr(timing, "_time", time)
        borders = torch.tensor([0, tokens], dtype=torch.int32)
        case = timing.Case(tokens, longest, heads, torch.bfloat16, 0.25, 128, 64, 96)
        found = timing.fastest(("cudnn", "triton"), borders, case)
        return found, timed

    return chosen


def test_the_faster_one_is_timed_once(choose):
    assert choose({"cudnn": 0.2, "triton": 0.1}) == ("triton", ["cudnn", "triton"])
    assert choose({"cudnn": 0.1, "triton": 0.2}) == ("triton", [])  # as it was
    for other in ({"tokens": 640}, {"longest": 128}, {"heads": (4, 4, 16)}):
        assert choose({"cudnn": 0.1, "triton": 0.2}, **other) == ("cudnn", ["cudnn", "triton"])


def test_where_cudnn_leads_nothing_is_timed(choose):
    assert choose({}, tokens=timing.LARGE) == ("cudnn", [])


def test_a_name_that_is_none_of_them_is_not_taken(choose, monkeypatch):
    choose({"cudnn": 0.2, "triton": 0.1})
    (key,) = user_cache.recall(timing.REMEMBERED)
    for value in ("flash", ["triton"], None):
        user_cache.remember(timing.REMEMBERED, key, value, 10)
        assert choose({"cudnn": 0.1, "triton": 0.2})[0] == "cudnn"
