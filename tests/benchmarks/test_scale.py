"""The scale model: collectives and overlap against hand-computed cases, what grows grows, and the record is current."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import measure, scale

INFINIBAND, ETHERNET = scale.NETWORKS["InfiniBand"], scale.NETWORKS["Ethernet"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("ranks", [2, 8])
def test_all_reduce_in_a_node(ranks: int) -> None:
    """168 MB over 8 GPUs: 2 x 7/8 of them at 370 GB/s are 0.794 ms, and 14 hops and the start 0.056 ms."""
    size = 4 * scale.MODELS["8b bf16"].adapter_values
    assert size == 4 * 41_943_040
    by_hand = {2: 2 / 2 * size / 370e9 + (8.4 + 2 * 3.4) * 1e-6, 8: 0.7935e-3 + (8.4 + 14 * 3.4) * 1e-6}
    assert scale.all_reduce(size, ranks, ETHERNET) == pytest.approx(by_hand[ranks], rel=1e-4)
    assert scale.all_reduce(size, 1, ETHERNET) == 0


def test_all_reduce_between_two_nodes() -> None:
    """Over Ethernet the hierarchical way sends each byte once: 168 MB at 11.75 GB/s are 14.3 ms, a ring's 15/8 of them
    26.8 ms. Over InfiniBand, whose cards together carry what NVLink does, the ring is the fastest."""
    size = 168e6
    assert scale.ring(size, 16, 2, ETHERNET) == pytest.approx(26.8e-3 + (8.4 + 28 * 3.4 + 2 * 14) * 1e-6, rel=1e-3)
    inside = 2 * 7 / 8 * size / 370e9 + (8.4 + 14 * 3.4) * 1e-6
    by_hand = inside + size / 11.75e9 + (8.4 + 2 * 14) * 1e-6
    assert scale.all_reduce(size, 16, ETHERNET) == pytest.approx(by_hand, rel=1e-6)
    assert scale.all_reduce(size, 16, INFINIBAND) == scale.ring(size, 16, 2, INFINIBAND)


def test_a_tree_is_fastest_on_many_ranks() -> None:
    """1,024 ranks: 7 levels of 128 nodes and 7 hops inside one, up and down, where a ring has 2,046 hops."""
    by_hand = (8.4 + 2 * (7 * 4.0 + 7 * 14)) * 1e-6
    assert scale.tree(0, 1024, INFINIBAND) == pytest.approx(by_hand)
    assert scale.all_reduce(1e6, 1024, INFINIBAND) == scale.tree(1e6, 1024, INFINIBAND)
    assert scale.ring(0, 1024, 2, INFINIBAND) == pytest.approx((8.4 + 1792 * 3.4 + 254 * 14) * 1e-6)


def test_all_gather_of_a_70b() -> None:
    """35 GB at 300 GB/s are 0.117 s. Of those a rank of 8 has its eighth already: 0.102 s, and 131 collectives."""
    model = scale.MODELS["70b nf4"]
    assert 80 * model.block_bytes == pytest.approx(35.3e9, rel=0.01)
    by_hand = 35e9 * 7 / 8 / 300e9 + 131 * (8.4 + 7 * 3.4) * 1e-6
    assert scale.all_gather(35e9, 8, ETHERNET) == pytest.approx(by_hand, rel=1e-6)
    assert scale.all_gather(35e9, 8, ETHERNET) == pytest.approx(0.12, rel=0.15)
    assert scale.all_gather(35e9, 1, ETHERNET) == 0


def test_the_slower_of_compute_and_gather_decides() -> None:
    """Four blocks, 1 s forward and 2 s backward, written out on paper."""
    assert scale.overlapped(4, 1, 0.5, 2, gather=0) == 12.5
    assert scale.overlapped(4, 1, 0.5, 2, gather=1) == 12.5, "hidden"
    # Forward: 0-1, 1-2, block 2 arrives at 4: 4-5, block 3 at 7: 7-8. Backward: 8-10, 10-12, block 1 (asked for at 10)
    # at 13: 13-15, block 0 at 16: 16-18.
    assert scale.overlapped(4, 1, 0, 2, gather=3) == 18
    assert scale.overlapped(2, 1, 0, 2, gather=100) == 6, "two blocks have a buffer each"
    many = scale.overlapped(1000, 1, 0, 2, gather=5)
    assert many == pytest.approx(2 * 1000 * 5, rel=0.01)


def test_compute_is_measured_where_it_was() -> None:
    measured = {name: scale.measured()[name]["ms"] / 1e3 for name in ("8b-4x2048", "8b-nf4-4x2048", "1b-4x2048")}
    for name, case in (("8b bf16", "8b-4x2048"), ("8b nf4", "8b-nf4-4x2048"), ("1b bf16", "1b-4x2048")):
        assert scale.compute_seconds(scale.MODELS[name]) == measured[case]
    found = scale.checks()
    assert set(found) == {"70b-nf4-1x2048-full", "1b-4x2048"}
    for name, both in found.items():
        assert both["model_ms"] == pytest.approx(both["measured_ms"], rel=0.12), name
    # FLOPs of a 405B: 4 a weight and token, or 5.8 times a 70B's.
    ratio = scale.compute_seconds(scale.MODELS["405b nf4"]) / scale.compute_seconds(scale.MODELS["70b nf4"])
    assert ratio == pytest.approx(405.8 / 70.5, rel=0.03)


@pytest.mark.thorough
def test_bytes_of_a_gpu() -> None:
    """A 70B over NF4 with a quarter of the tokens was measured; a 405B in bf16 takes two nodes."""
    model = scale.MODELS["70b nf4"]
    apart = model.base_bytes + 16 * model.adapter_values
    quarter = apart + (scale.held_bytes(model, 1) - apart) / 4
    assert quarter == pytest.approx(scale.measured()["70b-nf4-1x2048-full"]["peak_gib"] * 2**30, rel=0.02)
    large = scale.MODELS["405b bf16"]
    assert large.base_bytes == pytest.approx(811e9, rel=0.01)
    assert scale.held_bytes(large, 16) <= scale.MEMORY < scale.held_bytes(large, 8)
    fits = {(c["model"], c["way"]): c["ranks"][0] for c in scale.curves()}
    assert fits["405b bf16", "sharded"] == 16 and ("70b bf16", "replicated") not in fits


def test_the_record_is_current(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(scale.curves())
    monkeypatch.setattr(scale, "curves", lambda: found)  # they take seconds, and are written twice
    path = tmp_path / "scale.json"
    assert scale.main(["--json", str(path)]) == 0
    assert "A model, not a measurement" in capsys.readouterr().out
    kept = measure.RESULTS / "scale.json"
    assert json.loads(path.read_text()) == json.loads(kept.read_text()), (
        "run `python benchmarks/scale.py --json benchmarks/results/scale.json` and tools/readme.py"
    )
    assert scale.main(["--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)["scale"]
    assert all(0 < share <= 1 for curve in record["curves"] for share in curve["share"])
