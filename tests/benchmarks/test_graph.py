"""Graphs, accumulation and the plan's verdict, as far as they go without a GPU: nothing is captured here, so eager and
captured are one, bit for bit, and not faster."""

from __future__ import annotations

import json
import sys

import torch

from benchmarks import graph


def test_a_tiny_run(tmp_path, monkeypatch, capsys):
    out = tmp_path / "graph.json"
    words = ["graph.py", "--cases", "tiny-nf4-2x32", "--steps", "3", "--accumulate", "tiny-full-1x32"]
    monkeypatch.setattr(sys, "argv", [*words, "--json", str(out)])
    monkeypatch.setattr(graph, "SPEEDUP", 50.0)
    assert graph.main() == 1, "a goal that is missed is the exit code"
    found = json.loads(out.read_text())
    case = found["tiny-nf4-2x32"]
    assert (
        case["bit_equal"] is True
        and case["goals"][2]["met"]
        and case["most_apart"] == 0
        and len(case["goals"]) == 3
        and case["deterministic_steps"] == 3
    )
    assert [goal["met"] for goal in case["goals"]][:2] == [False, True]
    assert found["tiny-full-1x32"]["goals"][0]["is"] == found["tiny-full-1x32"]["ratio"] > 0
    assert "at least 50: NOT reached" in capsys.readouterr().out


def test_a_digest_is_of_every_bit_in_its_place():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([[3.0, -0.0]], dtype=torch.bfloat16)
    assert graph.digest([a, b]) == graph.digest([a.clone(), b.clone()])
    others = [[a.flip(0), b], [a, b.abs()], [b, a]]
    assert len({graph.digest(each) for each in (*others, [a, b])}) == 4, "a sum of words does not see an order"
