"""Inside the captured step: an infinite number in one micro-batch skips exactly that update, and the device counts the
tokens that it was sent."""

from __future__ import annotations

import pytest
import torch

from graftune.config import LoraConfig
from graftune.kernels import attention
from graftune.step.pipeline import DeviceLoop
from graftune.step.step import Step
from tests import injected, oracle

pytestmark = pytest.mark.gpu


def maker(folder, compute: torch.dtype, graph: bool = True):
    held = {torch.float32: "fp32", torch.bfloat16: "bf16"}[compute]

    def make():
        ours = oracle.ours(folder, LoraConfig(rank=4, alpha=8.0), device="cuda", compute=compute, base_dtype=held)
        width = ours.decoder.spec.head_width
        backend = attention.choose(torch.device("cuda"), compute, width, True, False).backend
        longest = injected.SHAPE["longest"]
        step = Step(ours.decoder, ours.arena, attention_backend=backend, longest=longest, dropout=0.1)
        return ours, step, DeviceLoop(step, graph)

    return make


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_an_inf_in_one_micro_batch_skips_exactly_that_update_inside_the_graph(compute, tiny_folder) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        injected.skips_exactly_that_update(maker(tiny_folder("llama-untied"), compute), fixed=True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_device_counts_its_tokens_inside_the_graph(tiny_folder) -> None:
    make = maker(tiny_folder("llama-untied"), torch.bfloat16)
    injected.counts_its_tokens(make, fixed=True)
