"""The curves: quantised bases beside dequantised ones on a tiny model, and verdicts that can be bad."""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import apart, curves
from graftune.kernels import fp8
from graftune.weights.base import open_base
from tests import tiny
from tests.training.runs import write_data


@pytest.fixture
def asked(tiny_folder, tmp_path: Path) -> list[str]:
    data = write_data(tmp_path / "data.jsonl", rows=40)
    words = [str(data), "--base", str(tiny_folder("llama")), "--device", "cpu", "--compute", "fp32", "--steps", "3"]
    return [*words, "--scratch", ""]


def run(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["curves.py", *words])
    return curves.main()


def test_quantised_bases_follow_their_dequantised_ones(asked, tmp_path, monkeypatch, capsys):
    out = tmp_path / "found.json"
    assert run(monkeypatch, *asked, "--base-dtype", "nf4,keep", "--json", str(out)) == 0
    found = json.loads(out.read_text())
    assert set(found["curves"]) == {"nf4", "dequantised", "keep", "bf16", "rounded"}
    assert {kind: f["beside"] for kind, f in found["compared"].items()} == {"nf4": "dequantised", "keep": "bf16"}
    for kind in ("nf4", "keep"):
        assert found["compared"][kind]["steps"] == 3 and found["compared"][kind]["loss_apart_most"] < 5e-3
        assert all(goal["met"] for goal in found["compared"][kind]["goals"])
    assert found["compared"]["nf4"]["loss_apart_most"] <= 1e-5, "the very same values"
    # NF4 is another model than the base's own weights: had the twin not been quantised, this would be the distance.
    other = apart.losses_apart(found["curves"]["nf4"]["losses"], found["curves"]["bf16"]["losses"])
    assert other["loss_apart_mean"] > 1e-3
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
    # One percent is too much for every loss, five for every tensor; the norm of all and the cosine are as they were.
    missed = {line.partition("  ")[0] for line in capsys.readouterr().out.splitlines() if "NOT reached" in line}
    assert missed == {
        "fp32: loss apart, most",
        "fp32: first gradients beyond 0.1%",
        "bf16: loss apart, mean",
        "bf16: loss apart, most",
        "bf16: first gradients beyond 2%",
    }


def test_only_the_first_records_are_read(asked, tmp_path, monkeypatch):
    lines = Path(asked[0]).read_bytes().splitlines(keepends=True)
    longer = tmp_path / "longer.jsonl"
    longer.write_bytes(b"\n" + b"".join(lines[:30]) + b" \n" + b"".join(lines[30:]))
    args = argparse.Namespace(data=str(longer), limit=35)
    with curves.limited(args):
        assert Path(args.data).read_bytes() == b"".join(lines[:35])
    assert args.data == str(longer)
    records = []
    for more in (["--limit", "35"], ["--limit", "0"]):
        out = tmp_path / "found.json"
        assert run(monkeypatch, str(longer), *asked[1:], *more, "--json", str(out)) == 0
        records.append(json.loads(out.read_text()))
    assert records[0]["data"]["lines"] == 35 and records[1]["data"]["lines"] == 42
    assert records[0]["global"]["losses"] != records[1]["global"]["losses"]
    assert all(record["commit"] and record["date"] for record in records)


def test_the_small_model_has_the_bases_tokenizer(tiny_folder):
    base = tiny_folder("llama")
    assert [path.name for path in curves.SMALL.iterdir()] == ["config.json"]
    with curves.scratch_model(argparse.Namespace(base=str(base), scratch=str(curves.SMALL))) as folder:
        made = open_base(folder, weights=False)
        assert made.spec.layers == 8 and made.spec.vocab == 49152
        assert made.tokenizer.backend.to_str() == open_base(str(base)).tokenizer.backend.to_str()
    with curves.scratch_model(argparse.Namespace(base="", scratch=str(base))) as folder:
        assert folder == str(base)


@pytest.fixture
def kept(monkeypatch) -> dict[str, Any]:
    """Curves and gradients that were made once and are asked for again. Those of the base, which is not what these
    tests vary, are the same whatever number of steps is asked for."""
    made: dict[str, Any] = {}

    def keeping(make: Any) -> Any:
        def get(args: argparse.Namespace, **more: Any) -> Any:
            key = f"{make.__name__} {more | {'base': 'base' in more}}"
            if key not in made:
                made[key] = make(args, **more)
            return copy.deepcopy(made[key])

        return get

    monkeypatch.setattr(curves, "curve", keeping(curves.curve))
    monkeypatch.setattr(curves, "first_gradients", keeping(curves.first_gradients))
    return made


def test_a_model_from_scratch_against_its_reference(asked, tiny_folder, tmp_path, monkeypatch, kept):
    shutil.copy(tiny_folder("llama") / "config.json", tmp_path)
    asked[-1] = str(tmp_path)
    reference, again = tmp_path / "reference.json", tmp_path / "again.json"
    monkeypatch.setitem(curves.SCRATCH, "max_steps", 3)

    def goals(*more: str) -> dict[str, bool | None]:
        run(monkeypatch, *asked, "--reference", str(reference), "--json", str(again), *more)
        return {g["what"]: g["met"] for g in curves.report.every_goal(json.loads(again.read_text()))}

    assert run(monkeypatch, *asked, "--json", str(reference)) == 1, "three steps do not halve a loss"
    found = goals()
    assert found.pop("scratch: last loss over the first") is False and all(found.values())
    assert sum(name.startswith("scratch, ") for name in found) == 3
    record = json.loads(reference.read_text())
    record["scratch"]["losses"] = [1.02 * loss for loss in record["scratch"]["losses"]]
    reference.write_text(json.dumps(record))
    part = [met for name, met in goals("--steps", "2").items() if name.startswith("scratch, ")]
    assert part == [False] * 3, "a curve's beginning will do"
    with monkeypatch.context() as patch:
        patch.setitem(curves.SCRATCH, "lr", 2e-3)
        assert {met for name, met in goals().items() if "scratch, " in name} == {None}, "another curve"
    # Made anew the curve is as it was at first, and what lies beside it is left alone.
    right = [loss / 1.02 for loss in record["scratch"]["losses"]]
    before = record | {"first_norms": {"kept": 1.0}}
    reference.write_text(json.dumps(before))
    kept.clear()
    run(monkeypatch, *asked, "--only", "scratch", "--json", str(reference))
    after = json.loads(reference.read_text())
    made = after.pop("scratch")
    assert made["losses"] == pytest.approx(right, rel=1e-6) and made["commit"] and made["data"]["lines"] == 40
    assert after == {name: value for name, value in before.items() if name != "scratch"}


def test_a_mean_does_not_answer_for_a_step(monkeypatch, tmp_path):
    flat, norms = {"losses": [1.0] * 20, "norms": [1.0]}, {f"layers.{i}.q_proj.lora_B.weight": 1.0 for i in range(9)}
    jump = {"losses": [1.0] * 19 + [1.02], "norms": [1.0]}
    found = {"fp32": flat, "global": jump, "rounded": flat, "first_norms_fp32": norms}
    found |= {"first_norms": norms | {"layers.3.q_proj.lora_B.weight": 1.03}, "first_gradients": {"cosine": 0.998}}
    (tmp_path / "noise.json").write_text(json.dumps({"bf16": {"tensors_beyond": 15, "cosine": 0.99}}))
    monkeypatch.setattr(apart, "YARDSTICK", tmp_path / "noise.json")
    goals = {g["what"]: g for g in apart.against(found, {"global": flat, "first_norms": norms})["goals"]}
    assert goals["bf16: loss apart, mean"]["met"] and goals["bf16: first gradient norm off"]["met"]
    missed = {what: g["noise"] for what, g in goals.items() if not g["met"]}
    assert missed == {
        "bf16: loss apart, most": 0.01961,
        "bf16: first gradients beyond 2%": 15,
        "bf16: first gradients, cosine to fp32": 0.99,
    }
    assert "NOT reached (bf16 by itself: 15)" in apart.said(goals["bf16: first gradients beyond 2%"])


def test_fp8_is_told_beside_bf16_and_nothing_is_asked_of_it(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(fp8, "require", lambda device, compute: None)  # the reference computes it on a CPU
    monkeypatch.setitem(tiny.VARIANT_OPTIONS, "llama-untied", {"intermediate_size": 96})  # fp8's are multiples of 16
    asked[2] = str(tiny.make_folder("llama-untied", tmp_path / "base"))
    out = tmp_path / "found.json"
    run(monkeypatch, *asked, "--base-dtype", "fp8", "--json", str(out))
    found = json.loads(out.read_text())
    assert set(found["curves"]) == {"fp8", "bf16", "rounded"}
    assert found["compared"]["fp8"]["goals"] == [] and found["compared"]["fp8"]["loss_apart_mean"] > 0


def test_a_gradient_that_is_off_is_seen():
    torch.manual_seed(0)
    right = {f"layers.{i}.x.lora_B.weight": torch.randn(8, 4) for i in range(3)}
    record = {"curves": {kind: {"losses": [1.0, 0.9]} for kind in ("keep", "bf16", "fp8")}}
    same = apart.compared(record, "keep", {"keep": right, "bf16": right})
    assert all(goal["met"] for goal in same["goals"]) and same["norm_off"] == 0
    wrong = right | {"layers.1.x.lora_B.weight": 1.03 * right["layers.1.x.lora_B.weight"]}
    off = apart.compared(record, "keep", {"keep": wrong, "bf16": right})
    assert off["worst"] == "layers.1.x.lora_B.weight" and off["tensors_beyond"] == 1
    assert [g["met"] for g in off["goals"]].count(False) == 2, "the worst norm, and how many are beyond"
    turned = right | {"layers.1.x.lora_B.weight": right["layers.1.x.lora_B.weight"].flip(0)}
    off = apart.compared(record, "keep", {"keep": turned, "bf16": right})
    assert [g["met"] for g in off["goals"]].count(False) == 1
    lost = {name: grad for name, grad in right.items() if "layers.1" not in name}
    off = apart.compared(record, "keep", {"keep": lost, "bf16": right})
    assert [g["met"] for g in off["goals"]].count(False) == 1
    assert apart.compared(record, "fp8", {"fp8": wrong, "bf16": right})["goals"] == []


def test_an_unknown_kind_is_refused(asked, monkeypatch):
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, *asked, "--base-dtype", "int3")
    assert error.value.code == 2


def test_each_kind_asks_for_its_own_placement(tmp_path):
    args = argparse.Namespace(base="b", data="d", steps=1, device="cpu", compute="fp32")
    held = {kind: curves.settings(args, "o", kind).base.base_dtype for kind in ("", *curves.KINDS)}
    same = {kind: kind for kind in ("bf16", "fp8", "keep", "nf4")}
    assert held == same | {"": "auto", "dequantised": "bf16"}
