"""The short form of tests/soak/soak_long.py: a thousand steps of a tiny model leave nothing behind but lines of the
log."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.soak import soak_long

STEPS = 1000


@pytest.mark.thorough
def test_nothing_grows_in_hundreds_of_steps(tiny_folder, tmp_path: Path) -> None:
    base = tiny_folder("llama-shallow")
    gc.collect()
    gc.freeze()
    found = soak_long.run(base, tmp_path, STEPS, "cpu", rows=160, points=20)
    assert len(found) == 20 and soak_long.grown(found) == []
    leaks = [m._replace(objects=m.objects + m.step, handles=m.handles + m.step // 200) for m in found]
    assert len(soak_long.grown(leaks)) == 2, "a leak would be seen"
