"""The tables of GPU figures know every goal: measured ones with their verdict, the others as not measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import measure, report


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    return tmp_path


def figures(ms: float, peak: float = 9.0) -> dict[str, float]:
    return {"ms": ms, "tok_s": 8192e3 / ms, "peak_gib": peak, "host_ms": 0.5, "syncs": 0}


def row_of(text: str, name: str) -> str:
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {name}")]
    return found


def test_without_records_everything_is_not_measured_yet(results: Path) -> None:
    text = report.gpu()
    for name in report.GOALS:
        assert report.ABSENT in row_of(text, f"`{name}`")
    for what in report.CHECKS.values():
        assert report.ABSENT in row_of(text, what)
    assert report.ABSENT in report.start()


def test_measured_rows_have_their_verdict(results: Path) -> None:
    run = {"run": "1", "tokens": 8192, "commit": "abc1234"}
    steps = {
        "8b-4x2048": run | {"participants": {"ours": figures(440, 40.0), "unsloth": figures(500, 46.0)}},
        "8b-nf4-4x2048": run | {"participants": {"ours": figures(460)}},
        "8b-nf4-4x2048-full": run | {"participants": {"ours": figures(640)}},
        "8b-8x1024": run | {"participants": {"ours": figures(400, 40.0)}},
        "8b-dpo-stored-4x1024": run | {"participants": {"ours": figures(416, 42.0)}},
        "8b-fp8-4x2048": run | {"run": "2", "participants": {"ours": figures(290), "floor": {"ms": 240.0}}},
    }
    checked = [measure.goal(f"Q{i}: values that differ", "at most", 0, int(i == 3)) for i in range(8)]
    (results / "h200.json").write_text(
        json.dumps({"gpu": "NVIDIA H200", "steps": steps, "kernels": {"goals": checked}})
    )
    text = report.gpu()
    assert "1.0454 (reached)" in row_of(text, "`8b-nf4-4x2048`")
    assert row_of(text, "`8b-nf4-4x2048-full`").endswith("9 (reached), 640 (missed), 0.5 (reached), 0 (reached) |")
    assert "1.04 (reached), 1.05 (missed), 0.5" in row_of(text, "`8b-dpo-stored-4x1024`")
    fp8 = row_of(text, "`8b-fp8-4x2048`")
    assert f"1.2083 (reached), {report.ABSENT}" in fp8, "the peer's time is of another run"
    assert "NVIDIA H200, 8b-nf4-4x2048-full | 640.0, 12.8k, 9.0 GiB | - | - | - |" in text
    assert "8 of them | 7 reached, Q3: values that differ: missed" in text
    assert report.ABSENT in row_of(text, "`1.5b-nf4-qv-4x512`")


@pytest.mark.thorough
def test_the_images_of_a_record(tmp_path: Path) -> None:
    from benchmarks import plots

    case = {"date": "2026-11-17", "participants": {"ours": figures(290), "floor": {"ms": 240.0}}}
    slow = {"participants": {"ours": figures(640), "unsloth": figures(900)}}
    lost = {"participants": {"floor": {"ms": 4.0}, "ours": {"error": "no time"}}}
    record = {"gpu": "NVIDIA H9", "steps": {"8b-4x2048": case, "8b-nf4-4x2048-full": slow, "1b-1x512": lost}}
    path = tmp_path / "h9.json"
    path.write_text(json.dumps(record))
    assert [made.name for made in plots.images(path, tmp_path)] == ["step-h9.png"], "no sweeps, no image of them"
    curves = {"1b": [{"x": 512, "ours": 2.4, "floor": 2.0}, {"x": 1024, "ours": 4.4, "floor": None}]}
    axes = {axis: {"commit": "abc", "curves": curves} for axis in ("tokens", "rank", "documents")}
    path.write_text(json.dumps(record | {"sweeps": axes}))
    assert [made.name for made in plots.images(path, tmp_path)] == ["step-h9.png", "sweeps-h9.png"]
    assert (tmp_path / "sweeps-h9.png").stat().st_size > 1000


@pytest.mark.parametrize("axes", [("rank",), ("tokens", "rank", "layers", "documents")])
def test_the_sweeps_caption_says_what_was_run(axes, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "IMAGES", results)
    assert report.sweeps() == ""
    (results / "sweeps-h9.png").write_bytes(b"")
    (results / "h9.json").write_text(json.dumps({"sweeps": {axis: {} for axis in axes}}))
    shown = report.sweeps()
    assert ("tokens, rank, layers and documents grow" if len(axes) > 1 else "as rank grows") in shown
