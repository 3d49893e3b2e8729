"""The benchmark of the plan without a GPU: its names, and that each kind of base can be planned."""

from __future__ import annotations

import pytest
import torch

from benchmarks import plan
from graftune.train.plan import Card

CARD = Card("a card", 80 << 30, 80 << 30)


def test_there_are_twelve_and_more_that_differ() -> None:
    found = [plan.parse(name) for name in plan.DEFAULT]
    assert len(set(found)) >= 12
    assert {c.policy for c in found} == {"none", "selective", "full", "offload"}
    assert {"bf16", "nf4", "q4_k"} <= {c.kind for c in found} and len({c.size for c in found}) >= 3
    assert len({c.shape.capacity for c in found}) >= 3


@pytest.mark.parametrize("kind", ["bf16", "nf4", "q8_0", "fp32"])
def test_every_kind_is_planned(kind: str) -> None:
    found = plan.plan(plan.parse(f"tiny-{kind}-full-2x64-r4"), torch.device("cuda", 0), CARD)
    assert found.owners["base"] > 0 and found.phases["capture"]["saved activations"] > 0


@pytest.mark.parametrize("name", ["tiny-bf16-none", "huge-bf16-none-1x64", "tiny-bf16-some-1x64", "tiny-q9-none-1x64"])
def test_what_is_not_there_is_said(name: str) -> None:
    with pytest.raises(SystemExit, match=name.split("-")[0]):
        plan.base_of(plan.parse(name), torch.device("cpu"))
