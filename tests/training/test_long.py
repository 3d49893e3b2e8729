"""The short form of tests/soak/soak_long.py: 1,000 steps of a tiny model leave nothing behind but lines of the log."""

from __future__ import annotations

import gc
from pathlib import Path

from tests.soak import soak_long


def test_nothing_grows_in_a_thousand_steps(tiny_folder, tmp_path: Path) -> None:
    base = tiny_folder("llama-shallow")
    gc.collect()
    gc.freeze()
    found = soak_long.run(base, tmp_path, 1000, "cpu", rows=400, points=20)
    assert len(found) == 20 and soak_long.grown(found) == []
    leaks = [m._replace(objects=m.objects + m.step, handles=m.handles + m.step // 500) for m in found]
    assert len(soak_long.grown(leaks)) == 2, "a leak would be seen"
