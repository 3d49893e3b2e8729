"""Tables in host memory on the GPU: a lookup reads the rows through the link, inside the captured step, without a wait.
Everything is what tables on the device compute, to the bit."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import pytest
import torch

from graftune.api import train
from graftune.model.families import from_config
from graftune.model.frozen.host_table import HostTable
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.runtime import resolve
from graftune.session import attention_for
from graftune.session.parts import choose_for_other_heads
from graftune.settings.config import Config
from graftune.settings.sections import LoraConfig
from graftune.step.pipeline import DevicePipeline
from graftune.step.step import Step
from graftune.weights.base import Base, open_base
from tests.gpu.test_gemma4 import WIDE
from tests.gpu.test_step import examples, never_waits, run
from tests.support import moe, quantised, tiny
from tests.training.runs import write_data

pytestmark = pytest.mark.gpu
LORA = LoraConfig(rank=4, alpha=8.0)


@pytest.fixture(scope="module", params=["gpt-oss", "Gemma 4", "Q4_K"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """An untied embedding in floats and in blocks, and per-layer embeddings beside a tied one."""
    if request.param == "gpt-oss":
        return open_base(str(moe.make_folder("gpt_oss-mxfp4", tmp_path_factory.mktemp("moe") / "gpt_oss")))
    if request.param == "Gemma 4":
        return quantised.gguf_base("Q8_0", from_config(tiny.config("gemma4") | WIDE, "a test"))
    return quantised.gguf_base("Q4_K", quantised.spec(256, layers=2), "Q6_K")


def ready(base: Base, on_host: bool, graph: bool) -> tuple[torch.Tensor, DevicePipeline]:
    ours = quantised.placed(base, LORA, "keep", "cuda", torch.bfloat16, embedding_on_host=on_host)
    decoder, runtime = ours.decoder, resolve("cuda", "bf16")
    table = decoder.embedding if decoder.layer_inputs is None else decoder.layer_inputs.table  # type: ignore[attr-defined]
    assert isinstance(table, HostTable) == on_host
    choose_for_other_heads(decoder, runtime)
    backend = attention_for(base, dataclasses.replace(runtime, deterministic=True), 64).backend
    return ours.arena.weights, DevicePipeline(Step(decoder, ours.arena, attention_backend=backend, longest=64), graph)


def test_the_same_to_the_bit(base: Base, deterministic: None) -> None:
    found = []
    for on_host, graph in ((False, True), (True, True), (True, False)):
        weights, loop = ready(base, on_host, graph)
        for i in range(6):
            run(loop, [examples(2 * i, 20, 33 + i), examples(2 * i + 1, 60)], lr=1e-2 / (i + 1))
        found.append(([f[1:] for f in loop.finished(wait=True)], weights.clone()))
        assert loop.captures == int(graph)
    for figures, weights in found[1:]:
        assert figures == found[0][0] and torch.equal(weights, found[0][1])


def test_nothing_waits(base: Base) -> None:
    never_waits(ready(base, True, True)[1])


def test_it_takes_no_memory_of_the_device_and_is_released() -> None:
    base = quantised.gguf_base("F16", quantised.spec(64, layers=1, vocab=100_000), "F16")
    taken = []
    for on_host in (False, True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        ours = quantised.placed(base, LORA, "keep", "cuda", torch.float16, embedding_on_host=on_host)
        taken.append(torch.cuda.memory_allocated() - before)
        if on_host:
            blocks = ours.decoder.embedding.members[0].blocks  # type: ignore[attr-defined]
            assert blocks.is_pinned()
        del ours
        gc.collect()
    assert taken[0] - taken[1] >= 100_000 * 64 * 2 and not blocks.is_pinned()


def test_a_run(tmp_path: Path) -> None:
    """With answers before and after it; it takes what was planned."""
    folder = moe.make_folder("gpt_oss-mxfp4", tmp_path / "base")
    losses = []
    for where in ("device", "host"):
        values = {
            "base": str(folder), "data": str(write_data(tmp_path / "data.jsonl")), "device": "cuda", "max_steps": 3,
            "samples": 2, "sample_tokens": 4, "out": str(tmp_path / where), "embedding_on": where,
            "deterministic": True,
        }  # fmt: skip
        train(Config.of(values), console=Console(quiet=True))
        losses.append([e["loss"] for e in read_events(tmp_path / where / "metrics.jsonl") if e["event"] == "step"])
    assert losses[0] == losses[1] and len(losses[0]) == 3
