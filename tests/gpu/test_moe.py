"""A mixture of experts on the GPU: gradients equal the CPU's, the captured step is the eager one bit for bit (routing
changes counts, never shapes), and nothing waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graftune.api import export
from graftune.data.pack import pack
from graftune.kernels import attention
from graftune.settings.sections import LoraConfig
from graftune.step.pipeline import DevicePipeline
from graftune.step.step import Step
from tests.exporting import models
from tests.gpu.test_step import SHAPE, documents_stay_apart, examples, never_waits, run
from tests.support import moe, oracle

pytestmark = pytest.mark.gpu
LORA = LoraConfig(rank=4, alpha=8.0, targets=("all_linear",))


@pytest.fixture(scope="module", params=["qwen3_moe", *moe.NEWER, "gpt_oss-mxfp4"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moe.make_folder(request.param, tmp_path_factory.mktemp("moe") / request.param)


@pytest.fixture(scope="module", params=["Q8_0", "Q4_K_M"])
def blocks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture in the blocks of a GGUF."""
    pytest.importorskip("gguf", reason="the gguf package is not installed: no GGUF file is written here")
    made = tmp_path_factory.mktemp("blocks")
    folder = moe.make_folder("qwen3_moe-wide", made / "folder")
    models.tokenizer().save(folder)
    return export(folder, "gguf", kind=request.param, out=made / "m.gguf").path


def ready(folder: Path, compute: torch.dtype, graph: bool, base_dtype: str = "fp32"):
    ours = oracle.ours(folder, LORA, device="cuda", compute=compute, base_dtype=base_dtype)
    torch.manual_seed(5)
    ours.arena.weights.copy_(torch.randn(len(ours.arena.weights)).mul_(0.05))
    ours.arena.publish()
    backend = attention.choose(
        torch.device("cuda"), compute, ours.decoder.spec.attention[0].head_width, True, False
    ).backend
    step = Step(ours.decoder, ours.arena, attention_backend=backend, longest=64)
    return ours, step, DevicePipeline(step, graph)


@pytest.mark.parametrize("base_dtype", ["fp32", "nf4", "keep"])
def test_gradients_equal_the_cpus(base_dtype, folder):
    gradients_equal_the_cpus(base_dtype, folder)


def gradients_equal_the_cpus(base_dtype: str, folder: Path) -> None:
    ours, step, _ = ready(folder, torch.float32, False, base_dtype)
    step.micro_step(pack(examples(1, 20, 33, 5), shape=SHAPE).to(torch.device("cuda")))
    cpu = oracle.ours(folder, LORA, base_dtype=base_dtype)
    cpu.arena.weights.copy_(ours.arena.weights)
    cpu.arena.publish()
    loss, want = cpu.gradients(examples(1, 20, 33, 5))
    assert float(step.loss_sum) == pytest.approx(loss, rel=1e-4)
    for name, grad in want.items():
        got = ours.arena.view(name, ours.arena.grads).cpu()
        assert (got - grad).norm() <= 1e-3 * grad.norm(), name


@pytest.mark.parametrize(
    ("compute", "base_dtype"),
    [(torch.float32, "fp32"), (torch.bfloat16, "fp32"), (torch.bfloat16, "nf4"), (torch.bfloat16, "keep")],
)
def test_captured_is_eager_bit_for_bit(compute, base_dtype, folder, deterministic):
    captured_is_eager(compute, base_dtype, folder)


def captured_is_eager(compute: torch.dtype, base_dtype: str, folder: Path) -> None:
    found = []
    for graph in (True, False):
        ours, _, loop = ready(folder, compute, graph, base_dtype)
        for i in range(6):
            run(loop, [examples(2 * i, 20, 33 + i), examples(2 * i + 1, 60)], lr=1e-2 / (i + 1))
        figures = [f[1:] for f in loop.finished(wait=True)]
        found.append((figures, ours.arena.weights.clone()))
        assert loop.captures == (1 if graph else 0)
    (figures, weights), (figures_, weights_) = found
    assert figures == figures_ and torch.equal(weights, weights_)


def test_experts_in_the_blocks_of_a_gguf(blocks, deterministic):
    gradients_equal_the_cpus("keep", blocks)
    captured_is_eager(torch.bfloat16, "keep", blocks)
    never_waits(ready(blocks, torch.bfloat16, True, "keep")[2])


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_documents_stay_apart(compute, folder, deterministic):
    ours, step, _ = ready(folder, compute, False)
    documents_stay_apart(ours.decoder, step.backend)


def test_nothing_waits(folder):
    never_waits(ready(folder, torch.bfloat16, True)[2])
