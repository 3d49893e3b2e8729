"""Inside the captured step: an infinite number in one micro-batch skips exactly that update, and the device counts the
tokens that it was sent. A run that skips too many in a row stops and says where the first bad number is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from graftune.api import train
from graftune.errors import GraftuneError
from graftune.kernels import attention
from graftune.model.frozen import Dense
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.settings.config import Config
from graftune.settings.sections import LoraConfig
from graftune.step.pipeline import DevicePipeline
from graftune.step.step import Step
from graftune.training.trainer import Trainer
from graftune.weights import checkpoint
from tests.support import injected, oracle
from tests.training.runs import adapter_bytes
from tests.training.test_loop import figures, settings

pytestmark = pytest.mark.gpu


def maker(folder, compute: torch.dtype, graph: bool = True):
    held = {torch.float32: "fp32", torch.bfloat16: "bf16"}[compute]

    def make():
        ours = oracle.ours(folder, LoraConfig(rank=4, alpha=8.0), device="cuda", compute=compute, base_dtype=held)
        width = ours.decoder.spec.attention[0].head_width
        backend = attention.choose(torch.device("cuda"), compute, width, True, False).backend
        longest = injected.SHAPE.longest
        step = Step(ours.decoder, ours.arena, attention_backend=backend, longest=longest, dropout=0.1)
        return ours, step, DevicePipeline(step, graph)

    return make


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_an_inf_in_one_micro_batch_skips_exactly_that_update_inside_the_graph(
    compute, tiny_folder, deterministic: None
) -> None:
    injected.skips_exactly_that_update(maker(tiny_folder("llama-untied"), compute), fixed=True)


def test_the_device_counts_its_tokens_inside_the_graph(tiny_folder) -> None:
    make = maker(tiny_folder("llama-untied"), torch.bfloat16)
    injected.counts_its_tokens(make, fixed=True)


def test_skipped_updates_in_a_row_stop_the_run_and_a_resume_goes_on_from_before(
    tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"device": "cuda", "compute_dtype": "bf16", "deterministic": True, "max_skipped": 3, "save_every": 1}
    folder, quiet = tiny_folder("llama-untied"), Console(quiet=True)

    def asked(name: str) -> Config:
        return settings(folder, tmp_path / name, **more, keep_last=1, epochs=6, patience=0)

    straight = train(asked("straight"), console=quiet).folder
    send = Trainer._send

    def poisoned(self: Trainer, micro_batches: list[Any]) -> None:
        table = self.parts.decoder.embedding
        assert isinstance(table, Dense)
        if self.state.progress.step == 4:
            table.weight[3 + 64 :] = math.inf  # every letter's, where the captured step reads it
        send(self, micro_batches)

    with monkeypatch.context() as patched, pytest.raises(GraftuneError) as stopped:
        patched.setattr(Trainer, "_send", poisoned)
        train(asked("run"), console=quiet)
    run, said = tmp_path / "run", str(stopped.value)
    assert "updates in a row (steps 5 to " in said and "step 4, from before them, is saved" in said, said
    assert "the output of the embedding is the first, in row" in said
    assert read_events(run / "metrics.jsonl")[-1]["stopped"] == "not finite"
    assert max(checkpoint.steps(run / "checkpoints")) == 4
    train(Config.load(run / "config.yaml"), console=quiet, resume=str(run))
    assert figures(run) == figures(straight) and adapter_bytes(run) == adapter_bytes(straight)
    warned = [event.get("kind") for event in read_events(straight / "metrics.jsonl") if event["event"] == "warning"]
    assert "tokens" not in warned
