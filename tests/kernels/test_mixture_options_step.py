"""Options of mixtures, as in tests/model/test_mixture_options.py, by the kernels: the loss and every gradient are those
that the references compute."""

from __future__ import annotations

import pytest
import torch

from graftune.data.pack import pack
from graftune.step.step import Step
from tests.kernels.harness import same_gradients, through_kernels
from tests.model.test_branches import EXAMPLES
from tests.model.test_mixture_options import made


@pytest.mark.skipif(torch.cuda.is_available(), reason="toy models lie on the CPU; tests/gpu/test_moe.py")
@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["biases, clamped", "sigmoid, shared", "gated shared"])
def test_the_kernels_compute_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = made(kind, deep=False).ours
    loss, _ = plain.gradients(EXAMPLES)
    through_kernels(monkeypatch)
    ours = made(kind, deep=False).ours
    step = Step(ours.decoder, ours.arena, attention_backend="triton")
    step.micro_step(pack(EXAMPLES, capacity=14, max_docs=3, max_rows=12))
    assert float(step.loss_sum) == pytest.approx(loss, rel=1e-4)
    same_gradients(ours.arena, ours.arena.grads, plain.arena.grads)
