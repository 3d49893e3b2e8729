"""The loading benchmark runs, measures what it says and adds up; its goals are for a quiet machine."""

from __future__ import annotations

import torch

from benchmarks import load
from graftune.model import huge_pages


def test_a_small_run() -> None:
    found = load.measure(gib=0.12, repeats=1)
    assert found["bytes"] > 200 << 20
    assert found["read_gb_s"] > 0 and found["fresh_gb_s"] > 0 and found["load_gb_s"] > 0 and found["mapped_s"] > 0
    assert abs(found["share"] - found["load_gb_s"] / found["read_gb_s"]) < 0.2
    assert found["met"] == (found["share"] > load.SHARE and found["mapped_s"] < load.MAPPED_S)


def test_advice_changes_no_value() -> None:
    for size in (0, 5, huge_pages.PAGE, 3 * huge_pages.PAGE + 17):
        tensor = torch.arange(size, dtype=torch.int64)
        assert huge_pages.advise(tensor) is tensor and torch.equal(tensor, torch.arange(size))
