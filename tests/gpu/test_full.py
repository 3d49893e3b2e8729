"""Every weight trains on CUDA: gradients as on the CPU, a captured run that learns, and one model whichever way."""

from __future__ import annotations

import json

import pytest
import torch

from graftune import api
from graftune.batch import Example
from graftune.data.pack import pack
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.session import open_session
from graftune.settings.config import Config
from graftune.step.step import Step
from tests.support import tiny

pytestmark = pytest.mark.gpu


def gradients(folder, device: str, compute: str, recompute: str = "none"):
    tokens = torch.randint(3, tiny.VOCAB, (3, 40), generator=torch.Generator().manual_seed(3)).tolist()
    batch = pack([Example(t[: 40 - 7 * i], [j > 9 for j in range(40 - 7 * i)]) for i, t in enumerate(tokens)])
    settings = {"base": str(folder), "method": "full", "device": device, "compute_dtype": compute}
    engine = open_session(Config.of(settings))
    step = Step(
        engine.parts.decoder, engine.parts.arena, recompute=recompute, attention_backend=engine.parts.eager_attention
    )
    for _ in range(2):
        step.micro_step(batch.to(engine.runtime.device))
    return float(step.loss_sum), {
        n: engine.parts.arena.view(n, engine.parts.arena.grads).cpu() for n in engine.parts.arena.slots
    }


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "offload"])
@pytest.mark.parametrize("variant", ["llama", "llama-untied", "qwen2", "qwen3"])
def test_gradients_equal_the_cpus(variant, recompute, tiny_folder):
    want_loss, want = gradients(tiny_folder(variant), "cpu", "fp32")
    for compute, cosine, far in (("fp32", 0.99999, 1e-3), ("bf16", 0.99, 0.15)):
        loss, got = gradients(tiny_folder(variant), "cuda", compute, recompute)
        assert loss == pytest.approx(want_loss, rel=1e-5 if compute == "fp32" else 0.02)
        for name, grad in got.items():
            a, b = grad.flatten(), want[name].flatten()
            assert torch.nn.functional.cosine_similarity(a, b, 0) > cosine, (compute, name)
            assert (a - b).norm() < far * b.norm(), (compute, name)


@pytest.mark.parametrize("method", ["full", "scratch"])
def test_a_captured_run_learns_and_is_the_eager_one(method, tiny_folder, tmp_path):
    rows = [{"text": f"the {a} {b} by"} for a in ("cat", "dog", "fox") for b in ("sat", "ran", "hid")] * 12
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    losses = []
    for graph in (True, False):
        settings = {
            "base": str(tiny_folder("llama")), "data": str(tmp_path / "data.jsonl"), "method": method, "device": "cuda",
            "graph": graph, "lr": 5e-3, "tokens_per_step": 256, "epochs": 6, "out": str(tmp_path / f"run-{graph}"),
            "eval_data": str(tmp_path / "data.jsonl"),
        }  # fmt: skip
        api.train(Config.of(settings), console=Console(quiet=True))
        events = read_events(tmp_path / f"run-{graph}" / "metrics.jsonl")
        losses.append([e["loss"] for e in events if e["event"] == "eval"])
        assert losses[-1][-1] < 0.6 * losses[-1][0]
        run = api.open(str(tmp_path / f"run-{graph}"), device="cpu", compute_dtype="fp32")
        assert run.evaluate(str(tmp_path / "data.jsonl")).loss == pytest.approx(losses[-1][-1], rel=0.1)
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize("method", ["full", "scratch"])
def test_captured_is_eager_bit_for_bit_in_deterministic_mode(method, tiny_folder, tmp_path):
    """The model's files too: embedding, head and norms are among what trains."""
    rows = [{"text": f"the {a} {b} by"} for a in ("cat", "dog", "fox") for b in ("sat", "ran", "hid")] * 6
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = []
    for graph in (True, False):
        settings = {
            "base": str(tiny_folder("llama")), "data": str(tmp_path / "data.jsonl"), "method": method, "device": "cuda",
            "graph": graph, "deterministic": True, "lr": 5e-3, "tokens_per_step": 128, "epochs": 2,
            "out": str(tmp_path / f"run-{graph}"),
        }  # fmt: skip
        folder = api.train(Config.of(settings), console=Console(quiet=True)).folder
        files = sorted(folder.rglob("*.safetensors"))
        assert files
        found.append({str(path.relative_to(folder)): path.read_bytes() for path in files})
        losses = [e["loss"] for e in read_events(folder / "metrics.jsonl") if e["event"] == "step"]
        found[-1]["losses"] = json.dumps(losses).encode()
    assert found[0] == found[1]
