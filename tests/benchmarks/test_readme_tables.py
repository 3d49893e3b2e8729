"""The tables of GPU figures know every goal: measured ones with their verdict, the others as not measured."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from benchmarks import cases, plots, report

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
readme = importlib.import_module("readme")


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    return tmp_path


def figures(ms: float, peak: float = 9.0) -> dict[str, float]:
    return {"ms": ms, "tok_s": 8192e3 / ms, "peak_gib": peak, "host_ms": 0.5}


def row_of(text: str, name: str) -> str:
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {name}")]
    return found


def test_without_records_everything_is_not_measured_yet(results):
    text = readme.gpu()
    for name in cases.GOALS:
        assert readme.ABSENT in row_of(text, f"`{name}`")
    for _, _, what in readme.OTHERS:
        assert readme.ABSENT in row_of(text, what)


def test_measured_rows_have_their_verdict(results):
    run = {"run": "1", "tokens": 8192, "commit": "abc1234"}
    record = {
        "gpu": "NVIDIA H9",
        "cases": {
            "8b-4x2048": run | {"participants": {"ours": figures(440, 40.0), "unsloth": figures(500, 46.0)}},
            "8b-nf4-4x2048": run | {"participants": {"ours": figures(460)}},
            "8b-nf4-4x2048-full": run | {"participants": {"ours": figures(640)}},
            "8b-fp8-4x2048": run | {"participants": {"ours": figures(290), "floor": {"ms": 240.0}}},
        },
    }
    (results / "step-h9.json").write_text(json.dumps(record))
    kinds = {f"Q{i}": {"goals": [report.goal("values that differ", "at most", 0, int(i == 3))]} for i in range(8)}
    (results / "kernels-h9.json").write_text(json.dumps({"kinds": kinds}))
    fp8 = {"compared": {"fp8": {"goals": [report.goal("fp8: loss apart, most", "at most", 0.005, 0.004)]}}}
    (results / "bases-fp8-h9.json").write_text(json.dumps(fp8))
    text = readme.gpu()
    assert "1.0454 (reached)" in row_of(text, "`8b-nf4-4x2048`")
    assert row_of(text, "`8b-nf4-4x2048-full`").endswith("9 (reached), 640 (missed), 0.5 (reached) |")
    assert row_of(text, "`8b-fp8-4x2048`").endswith("1.2083 (reached), 1.7241 (reached), 0.5 (reached) |")
    assert "NVIDIA H9, 8b-nf4-4x2048-full | 640.0, 12.8k, 9.0 GiB | - | - | - |" in text
    assert "8 of them | 7 reached, Q3 values that differ: missed" in text
    assert "0.004 (reached)" in row_of(text, "the same over FP8")
    assert readme.ABSENT in row_of(text, "`1.5b-nf4-qv-4x512`") and readme.ABSENT in row_of(text, "over NF4")


def test_what_has_no_floor_is_drawn_in_milliseconds(tmp_path, monkeypatch):
    rows: list[list[plots.Group]] = []
    real = plots.panel
    monkeypatch.setattr(plots, "panel", lambda axes, groups: (rows.append(list(groups)), real(axes, groups)))
    recomputed = {"8b-nf4-4x2048-full": {"participants": {"ours": figures(640), "unsloth": figures(900)}}}
    lost = {"1b-1x512": {"participants": {"floor": {"ms": 4.0}, "ours": {"error": "no time"}}}}
    assert plots.draw({"cases": lost}, tmp_path / "a.png") == []
    both = recomputed | lost | {"8b-fp8-4x2048": {"participants": {"ours": figures(290), "floor": {"ms": 240.0}}}}
    assert plots.draw({"cases": both}, tmp_path / "b.png") == [tmp_path / "b.png"]
    assert [[group.name for group in row] for row in rows] == [["8b-fp8-4x2048"], ["8b-nf4-4x2048-full"]]
    assert rows[0][0].label == "8b-fp8\n4x2048\nfloor 240 ms" and rows[1][0].label == "8b-nf4\n4x2048-full\n9.0 GiB"
    many = {f"8b-r{i}-4x2048": {"participants": {"ours": figures(290), "floor": {"ms": 240.0}}} for i in range(30)}
    del rows[:]
    assert plots.draw({"cases": many}, tmp_path / "c.png") and sum(map(len, rows)) == 30 and len(rows) > 1


def test_the_images_of_a_record(tmp_path):
    point = {"participants": {"floor": {"ms": 2.0}, "ours": {"ms": 2.4}}}
    record = {"cases": {"8b-4x2048": {"participants": {"ours": figures(290), "floor": {"ms": 240.0}}}}}
    path = tmp_path / "step-h9.json"
    path.write_text(json.dumps(record))
    assert [made.name for made in plots.images(path, tmp_path)] == ["step-h9.png"], "no sweeps, no image of them"
    curves = {"1b": [point | {"x": 512}, point | {"x": 1024}]}
    path.write_text(
        json.dumps(record | {"sweeps": {"documents": curves, "tokens": curves, "rank": {}, "layers": curves}})
    )
    assert [made.name for made in plots.images(path, tmp_path)] == ["step-h9.png", "sweeps-h9.png"]
    assert (tmp_path / "sweeps-h9.png").stat().st_size > 1000


def test_the_readme_shows_the_sweeps_that_were_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "IMAGES", tmp_path)
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    without = readme.rewritten(text)
    assert "<!-- sweeps -->\n<!-- end sweeps -->" in without and "sweeps-" not in without
    (tmp_path / "sweeps-h200.png").write_bytes(b"")
    shown = readme.rewritten(without)
    assert "](images/sweeps-h200.png)" in shown and readme.rewritten(shown) == shown
    (tmp_path / "sweeps-h200.png").unlink()
    assert readme.rewritten(shown) == without


@pytest.mark.parametrize("sustained", [True, False])
@pytest.mark.parametrize("axes", [("rank",), ("tokens", "rank", "layers", "documents")])
def test_the_sweeps_caption_says_what_was_run(tmp_path, monkeypatch, axes, sustained):
    monkeypatch.setattr(readme, "IMAGES", tmp_path)
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    (tmp_path / "sweeps-h9.png").write_bytes(b"")
    point = {"x": 4, "participants": {"ours": {"ms": 1.0} | ({"sustained_s": 1.0} if sustained else {})}}
    record = {"sweeps": {axis: {"1b": [point]} for axis in axes}}
    (tmp_path / "step-h9.json").write_text(json.dumps(record))
    shown = readme.sweeps()
    assert ("tokens, rank, layers and documents grow" if len(axes) > 1 else "as rank grows") in shown
    assert ("Not run yet: tokens, layers, documents." in shown) == (len(axes) == 1)
    assert ("the nearer it looks" in shown) != sustained
