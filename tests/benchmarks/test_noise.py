"""The yardstick of bf16 noise: products that round where a GPU rounds, and documents taken apart again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import noise
from graftune.batch import Example
from graftune.data.pack import pack
from tests.training.runs import write_data


def test_a_product_rounds_its_operands_and_its_result():
    torch.manual_seed(0)
    x, w, grad = (torch.randn(size) for size in ((3, 5, 40), (24, 40), (3, 5, 24)))
    x.requires_grad_(), w.requires_grad_()
    plain = F.linear
    with noise.as_a_gpu():
        y = F.linear(x, w)
    assert F.linear is plain and y.dtype == torch.bfloat16
    short = [t.detach().bfloat16().float() for t in (x, w)]
    assert torch.equal(y, (short[0] @ short[1].t()).bfloat16())
    y.backward(grad.bfloat16())
    want = grad.bfloat16().float() @ short[1]
    assert torch.equal(x.grad, want.bfloat16().float()) and not torch.equal(x.grad, want)
    assert torch.equal(w.grad, (grad.bfloat16().float().view(15, 24).t() @ short[0].view(15, 40)).bfloat16().float())


def test_documents_come_back():
    examples = [Example([5, 6, 7, 8], [False, False, True, True]), Example([9, 1, 2], [False, True, False])]
    batch = pack(examples, capacity=12, max_docs=4, max_rows=8, longest=6)
    found = list(noise.documents([batch]))
    assert found == [([5, 6, 7, 8], [-100, 7, 8, -100]), ([9, 1, 2], [1, -100, -100])]


def test_how_far_apart():
    there = {f"layers.{i}.q_proj.lora_B.default.weight": torch.ones(2, 2) for i in range(3)}
    here = there | {"layers.1.q_proj.lora_B.default.weight": torch.full((2, 2), 1.03)}
    found = noise.apart(here, there)
    assert found["tensors"] == 3 and found["tensors_beyond"] == 1 and found["worst_by_projection"] == {"q_proj": 0.03}


def test_a_record_says_what_made_it(tmp_path, monkeypatch):
    data, out = write_data(tmp_path / "data.jsonl", rows=9), tmp_path / "noise.json"
    seen = []

    def measured(args) -> dict[str, Any]:
        seen.append(Path(args.data).read_bytes())
        return {"bf16": {"tensors": 1, "tensors_beyond": 0, "bound": 0.02}}

    monkeypatch.setattr(noise, "measured", measured)
    words = [str(data), "--limit", "4", "--commit", "abc", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["noise.py", *words])
    noise.main()
    found = json.loads(out.read_text())
    assert found["commit"] == "abc" and found["date"] and found["data"]["lines"] == 4 and found["bf16"]["tensors"] == 1
    assert seen == [b"".join(data.read_bytes().splitlines(keepends=True)[:4])]
