"""The ten lines of the README, run as they stand there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import graftune
from graftune.config import Config
from graftune.errors import GraftuneError

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.fixture
def data(tmp_path):
    rows = [{"prompt": f"Say {i}", "response": f"It is {i}."} for i in range(12)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_the_readme_example_runs(tiny_folder, data, tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n(import graftune\n.*?)```", README.read_text(), re.S)[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(tmp_path)
    code = code.replace('"model.gguf"', repr(str(tiny_folder("llama")))).replace("data.jsonl", str(data))
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").exists()
    assert capsys.readouterr().out.strip()


def test_a_whole_run_as_the_readme_calls_it(tiny_folder, data, tmp_path):
    made = {"base": str(tiny_folder("llama")), "data": str(data), "out": str(tmp_path / "run"), "max_steps": 1}
    result = graftune.__getattr__("api").train(Config.of(made | {"rank": 2, "samples": 0, "device": "cpu"}))
    assert (result.steps, result.stopped) == (1, "finished")


def test_loss_falls_and_the_adapter_comes_back(tiny_folder, data, tmp_path):
    run = graftune.open(str(tiny_folder("llama")), rank=4, alpha=8.0, lr=1e-2, compute_dtype="fp32")
    examples = run.prepare(str(data))
    before = run.evaluate(examples)
    losses = []
    for epoch in range(8):
        for batch in run.batches(examples, epoch):
            run.forward_backward(batch)
        stats = run.optim_step()
        losses.append(stats.loss)
    assert losses[-1] < losses[0] * 0.9 and stats.grad_norm > 0 and stats.response_tokens == before.response_tokens
    tuned = run.evaluate(examples)
    run.save(tmp_path / "adapter")
    again = graftune.open(str(tmp_path / "adapter"), compute_dtype="fp32")
    assert again.evaluate(examples) == tuned
    assert again.evaluate(examples, adapted=False).loss == pytest.approx(before.loss, rel=1e-6)
    assert again.describe()["adapter"]


def test_mistakes(tiny_folder):
    run = graftune.open(str(tiny_folder("llama")), rank=2)
    with pytest.raises(GraftuneError, match="forward_backward first"):
        run.optim_step()
    with pytest.raises(GraftuneError, match="unknown key"):
        graftune.open(str(tiny_folder("llama")), rnak=2)
    with pytest.raises(GraftuneError, match="max_new_tokens"):
        run.generate("x", max_new_tokens=0)
