"""The curves: quantised bases beside dequantised ones on a tiny model, and verdicts that can be bad."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import curves
from tests.train.runs import write_data


@pytest.fixture
def asked(tiny_folder, tmp_path: Path) -> list[str]:
    data = write_data(tmp_path / "data.jsonl", rows=40)
    return [str(data), "--base", str(tiny_folder("llama")), "--device", "cpu", "--compute", "fp32", "--steps", "3"]


def run(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["curves.py", *words])
    return curves.main()


def test_quantised_bases_follow_their_dequantised_ones(asked, tmp_path, monkeypatch, capsys):
    out = tmp_path / "found.json"
    assert run(monkeypatch, *asked, "--base-dtype", "nf4,keep", "--json", str(out)) == 0
    found = json.loads(out.read_text())
    assert set(found["curves"]) == {"nf4", "dequantised", "keep", "bf16"}
    assert {kind: f["beside"] for kind, f in found["compared"].items()} == {"nf4": "dequantised", "keep": "bf16"}
    for kind in ("nf4", "keep"):
        assert found["compared"][kind]["steps"] == 3 and found["compared"][kind]["loss_apart_most"] < 5e-3
        assert all(goal["met"] for goal in found["compared"][kind]["goals"])
    assert found["compared"]["nf4"]["loss_apart_most"] <= 1e-5, "the very same values"
    # NF4 is another model than the base's own weights: had the twin not been quantised, this would be the distance.
    apart = curves.losses_apart(found["curves"]["nf4"]["losses"], found["curves"]["bf16"]["losses"])
    assert apart["loss_apart_mean"] > 1e-3
    assert "nf4: loss apart, most" in capsys.readouterr().out


def test_the_usual_record_against_a_reference(asked, tmp_path, monkeypatch, capsys):
    reference = tmp_path / "reference.json"
    assert run(monkeypatch, *asked, "--json", str(reference)) == 0
    assert run(monkeypatch, *asked, "--reference", str(reference), "--json", str(tmp_path / "again.json")) == 0
    found = json.loads((tmp_path / "again.json").read_text())
    for kind in ("fp32", "bf16"):
        assert found["against"][kind]["loss_apart_most"] == 0 and found["against"][kind]["tensors_beyond"] == 0
    record = json.loads(reference.read_text())
    record["global"]["losses"] = [loss * 1.01 for loss in record["global"]["losses"]]
    record["first_norms"] = {name: 1.05 * norm for name, norm in record["first_norms"].items()}
    reference.write_text(json.dumps(record))
    assert run(monkeypatch, *asked, "--reference", str(reference)) == 1
    assert capsys.readouterr().out.count("NOT reached") == 3  # one percent is too much for fp32 and for bf16's mean


def test_a_gradient_that_is_off_is_seen():
    torch.manual_seed(0)
    right = {f"layers.{i}.x.lora_B.weight": torch.randn(8, 4) for i in range(3)}
    record = {"curves": {kind: {"losses": [1.0, 0.9]} for kind in ("keep", "bf16", "fp8")}}
    same = curves.compared(record, "keep", {"keep": right, "bf16": right})
    assert all(goal["met"] for goal in same["goals"]) and same["norm_off"] == 0
    wrong = right | {"layers.1.x.lora_B.weight": 1.03 * right["layers.1.x.lora_B.weight"]}
    off = curves.compared(record, "keep", {"keep": wrong, "bf16": right})
    assert off["worst"] == "layers.1.x.lora_B.weight" and [g["met"] for g in off["goals"]].count(False) == 1
    turned = right | {"layers.1.x.lora_B.weight": right["layers.1.x.lora_B.weight"].flip(0)}
    off = curves.compared(record, "keep", {"keep": turned, "bf16": right})
    assert [g["met"] for g in off["goals"]].count(False) == 1
    lost = {name: grad for name, grad in right.items() if "layers.1" not in name}
    off = curves.compared(record, "keep", {"keep": lost, "bf16": right})
    assert [g["met"] for g in off["goals"]].count(False) == 1
    assert len(curves.compared(record, "fp8", {"fp8": wrong, "bf16": right})["goals"]) == 2


def test_an_unknown_kind_is_refused(asked, monkeypatch):
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, *asked, "--base-dtype", "int3")
    assert error.value.code == 2


def test_each_kind_asks_for_its_own_placement(tmp_path):
    args = argparse.Namespace(base="b", data="d", steps=1, device="cpu", compute="fp32")
    held = {kind: curves.settings(args, "o", kind).base.base_dtype for kind in ("", *curves.KINDS)}
    assert held == {"": "auto", "bf16": "bf16", "fp8": "fp8", "keep": "keep", "nf4": "nf4", "dequantised": "bf16"}
