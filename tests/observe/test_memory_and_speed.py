"""Measured bytes are plausible and heed cgroup limits; the meter forgets old steps and pauses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from graftune.observe import memory
from graftune.observe.speed import Meter


def test_bytes_are_plausible() -> None:
    before = memory.resident_bytes()
    # Above 32 MiB malloc always maps new pages; a smaller block may take what a test before this one has freed.
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert memory.resident_bytes() - before > 48 << 20
    assert memory.peak_resident_bytes() >= memory.resident_bytes() - (4 << 20)
    assert 0 < memory.available_bytes() <= memory.total_bytes()
    cpu = memory.device_bytes("cpu")
    assert cpu.peak > held.numel() and cpu.free <= cpu.total


@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_cgroup_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    root = groups if version == 2 else groups / "memory"
    outer, inner = root / "outer", root / "outer" / "inner"
    inner.mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/outer/inner\n" if version == 2 else "4:memory:/outer/inner\n3:cpu:/x\n")
    (proc / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    limit, used, prefix = (
        ("memory.max", "memory.current", "")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    )
    cached = f"{prefix}inactive_file 60000\n{prefix}active_file 40000\n"
    (inner / limit).write_text("max\n" if version == 2 else "9223372036854771712\n")
    (inner / used).write_text("100\n")
    (inner / "memory.stat").write_text(f"{prefix}inactive_file 0\n")
    (outer / limit).write_text("1000000\n")
    (outer / used).write_text("400000\n")
    (outer / "memory.stat").write_text(f"anon 5\n{cached}active_anon 7\n")
    monkeypatch.setattr(memory, "PROC", proc)
    monkeypatch.setattr(memory, "CGROUPS", groups)
    assert memory.available_bytes() == 1_000_000 - 400_000 + 100_000
    assert memory.total_bytes() == 1_000_000


def test_meter_follows_the_last_steps() -> None:
    now = [0.0]
    meter = Meter(100, window=4, clock=lambda: now[0])
    assert meter.tok_s == 0 and meter.left is None
    now[0] += 60  # a slow first step
    meter.update(1, 600)
    assert meter.tok_s == 10 and meter.left is None, "a first step is no measure of the others"
    now[0] += 2
    meter.update(2, 600)
    assert meter.tok_s == 300 and meter.left == 98 * 2, "and it is left out as soon as there is another"
    for step in range(3, 11):
        now[0] += 2
        meter.update(step, 600)
    assert meter.tok_s == 300 and meter.left == 90 * 2


def test_pauses_and_a_resumed_start_do_not_count() -> None:
    now = [0.0]
    meter = Meter(20, done=10, clock=lambda: now[0])
    now[0] += 1
    with meter.paused():
        now[0] += 1000
    assert meter.update(11, 50) == 50 and meter.left is None and meter.elapsed == 1
    now[0] += 3
    with meter.paused():
        now[0] += 1000
    assert meter.since_last == 3
    assert meter.update(12, 60) == 20 and meter.since_last == 0 and meter.left == 8 * 3 and meter.elapsed == 4
    now[0] += 3
    meter.update(20, 60)
    assert meter.left == 0
