"""Gemma 4's sizes on the GPU: heads of 512 in the tiles of a run, and shared keys and per-layer embeddings over the
blocks of a GGUF. Tiny models of the families are in test_families.py and test_moe.py."""

from __future__ import annotations

import pytest
import torch

from graftune.data.pack import pack
from graftune.model.families import from_config
from graftune.runtime import resolve
from graftune.session import attention_for
from graftune.session.parts import choose_for_other_heads
from graftune.settings.sections import LoraConfig
from graftune.step.pipeline import DevicePipeline
from graftune.step.step import Step
from tests.gpu.test_step import SHAPE, examples, run
from tests.kernels.test_attention_kernel import check
from tests.support import quantised, tiny

pytestmark = pytest.mark.gpu
LORA = LoraConfig(rank=4, alpha=8.0)
# Wide enough for blocks of 256 values and for real heads of 512 in layers without a window.
WIDE = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 256, "global_head_dim": 512, "num_attention_heads": 2,
    "num_key_value_heads": 1, "hidden_size_per_layer_input": 256,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [(2048, 700), (1, 0, 65, 130), (5000,)])
def test_heads_of_512(dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    check(lengths, (4, 1, 512), dtype, "cuda")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_the_blocks_of_a_gguf(kind: str) -> None:
    """Gradients equal the CPU's, and the step is captured."""
    base = quantised.gguf_base(kind, from_config(tiny.config("gemma4") | WIDE, "a test"))
    batch, found = pack(examples(1, 20, 60, 5), shape=SHAPE), []
    for device in ("cuda", "cpu"):
        ours = quantised.placed(base, LORA, "keep", device)
        runtime = resolve(device, "fp32")
        choose_for_other_heads(ours.decoder, runtime)
        backend = attention_for(base, runtime, SHAPE.longest).backend
        step = Step(ours.decoder, ours.arena, attention_backend=backend, longest=SHAPE.longest)
        step.micro_step(batch.to(torch.device(device)))
        found.append({n: ours.arena.view(n, ours.arena.grads).cpu() for n in ours.arena.slots})
    for name, grad in found[1].items():
        assert (found[0][name] - grad).norm() <= 1e-3 * grad.norm(), name
    ours, runtime = quantised.placed(base, LORA, "keep", "cuda", torch.bfloat16), resolve("cuda", "bf16")
    choose_for_other_heads(ours.decoder, runtime)
    backend = attention_for(base, runtime, SHAPE.longest).backend
    loop = DevicePipeline(Step(ours.decoder, ours.arena, attention_backend=backend, longest=SHAPE.longest), True)
    for _ in range(12):
        run(loop, [examples(0, 40, 60)], lr=5e-3)
    losses = [f.loss for f in loop.finished(wait=True)]
    assert loop.captures == 1 and losses[-1] < losses[0]
