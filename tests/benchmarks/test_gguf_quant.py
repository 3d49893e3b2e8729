"""The quantisers' benchmark runs, and its record adds up; its times are for a quiet machine."""

from __future__ import annotations

import json
import sys

from benchmarks import gguf_quant


def test_a_small_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gguf_quant, "BLOCKS", ("Q8_0", "Q4_K"))
    monkeypatch.setattr(
        sys, "argv", ["gguf_quant", "--values", "8192", "--repeats", "1", "--json", str(tmp_path / "x")]
    )
    code = gguf_quant.main()
    found = json.loads((tmp_path / "x").read_text())
    assert code == (0 if found["met"] else 1) and found["values"] == 8192 and found["cpu"] and found["commit"]
    eight, four = found["kinds"]["Q8_0"], found["kinds"]["Q4_K"]
    assert eight["same"] == 1 and eight["error"] == 1 and 0.9 < four["error"] < 1.03
    assert set(eight["cpu"]) == {"ours", "llama.cpp", "gguf-py"} and set(four["cpu"]) == {"ours", "llama.cpp"}
    assert [goal["is"] for goal in found["goals"][2:]] == [max(eight["error"], four["error"])]
