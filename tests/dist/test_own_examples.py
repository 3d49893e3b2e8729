"""A loop of one's own on two ranks computes what it does on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.launcher import Launcher


def test_two_ranks_are_one(launcher: Launcher, base: Path) -> None:
    found = []
    for size in (0, 2):
        out = launcher.root / f"own-{size}.json"
        ended = launcher.run(size, base, out, module="tests.dist.own_examples")
        assert ended.codes == [0] * max(1, size), ended.said
        found.append(json.loads(out.read_text()))
    (figures, weights), (figures_, weights_) = found
    assert len(figures) == 3
    for one, other in zip(figures, figures_, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert weights == pytest.approx(weights_, rel=1e-3, abs=1e-5)
