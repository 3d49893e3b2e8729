"""The benchmark of dequantisation, on the CPU's references: what it checks, how far apart rows lie, what it says."""

from __future__ import annotations

import io
import json
import sys

import torch

from benchmarks import quant_kernels
from graftune.kernels import gguf_dequant

CPU = torch.device("cpu")


def test_rows_lie_as_far_apart_as_a_steps():
    bench = quant_kernels.Bench(torch.device("meta"))
    assert [bench.scratch(shape).stride(0) for shape in quant_kernels.SHAPES] == [4160, 14400]
    assert [tuple(bench.scratch(shape).shape) for shape in quant_kernels.SHAPES] == [(28704, 4128), (4112, 14352)]


def test_a_small_run_and_a_kind_that_differs(monkeypatch):
    log = io.StringIO()

    def measured():
        return quant_kernels.measure(CPU, ("nf4", "Q4_K", "Q8_0"), [(64, 256)], (16, 256), log)

    found = measured()
    assert found["shapes"]["[64, 256]"]["apart"] == 320
    for row in found["kinds"].values():
        figures = row["[64, 256]"]
        assert row["differing"] == 0 and row["goals"][0]["met"] and figures["us"] > 0
        # Bytes of copies of one size are timed twice: only their order of magnitude is known here.
        assert row["goals"][1]["is"] == figures["of_copy"] >= 0
    assert "of copy" in log.getvalue()
    real = gguf_dequant.dequantise

    def wrong(blocks, kind, out):
        real(blocks, kind, out)
        if kind == "Q4_K":
            out[3, 5] += 1

    monkeypatch.setattr(quant_kernels.gguf_dequant, "dequantise", wrong)
    found = measured()["kinds"]
    assert found["Q4_K"]["differing"] > 0 and found["Q4_K"]["goals"][0]["met"] is False
    assert found["Q8_0"]["differing"] == 0


def test_every_shape_must_come_near_a_copy():
    def met(*shares: float) -> list[bool | None]:
        row = {"differing": 0} | {f"[{i}, 256]": {"of_copy": share} for i, share in enumerate(shares)}
        return [goal["met"] for goal in quant_kernels.goals(row)]

    assert met(0.9, 0.8) == [True, True] and met(0.9, 0.79) == [True, False] and met() == [True, None]


def test_a_record_says_where_it_is_from(tmp_path, monkeypatch, capsys):
    out, row = tmp_path / "kernels.json", {"differing": 0, "[64, 256]": {"of_copy": 0.7}}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H9")
    kinds = {"kinds": {"Q4_K": row | {"goals": quant_kernels.goals(row)}}}
    monkeypatch.setattr(quant_kernels, "measure", lambda device, log: kinds)
    monkeypatch.setattr(sys, "argv", ["quant_kernels.py", "--json", str(out), "--commit", "abc"])
    assert quant_kernels.main() == 0, "slow is not wrong"
    record = json.loads(out.read_text())
    assert (record["gpu"], record["commit"]) == ("NVIDIA H9", "abc") and record["date"].endswith("UTC")
    said = capsys.readouterr().out
    assert said.startswith("Q4_K") and said.endswith("at least 0.8: NOT reached\n") and said.count("\n") == 1


def test_what_is_written_beside_the_values_counts(monkeypatch):
    bench = quant_kernels.Bench(CPU)
    real = gguf_dequant.dequantise

    def spills(blocks, kind, out):
        real(blocks, kind, out)
        if out.stride(0) > out.shape[1]:
            torch.as_strided(out, (len(out), out.shape[1] + 1), out.stride(), out.storage_offset())[:, -1] = 0

    monkeypatch.setattr(quant_kernels.gguf_dequant, "dequantise", spills)
    assert bench.differing("Q8_0", (16, 64)) == 3 * 2 * 16
