"""The real default base: a Q4_1 GGUF read by us against transformers over the same dequantised values.

Tiny random models prove the formulas; this proves them at size: thirty layers of fp32 sums, every tensor of the file
taken, blocks kept in the file. What the loader itself reads off the file (row order of Q and K, rope base, epsilon) the
two sides share here; test_llama_cpp.py judges that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graftune.batch import Example
from graftune.weights.base import Base
from graftune.weights.gguf_io import read_gguf
from tests.support import oracle, quantised

TEXTS = (
    "The old lighthouse keeper climbed the stairs every evening, wound the clock, and wrote the weather in a book.",
    "<|im_start|>user\nWhich of these is heavier: 3 kg of feathers or 2 kg of lead?<|im_end|>\n<|im_start|>assistant\n",
    "def mean(xs):\n    return sum(xs) / len(xs)  # naïve, 平均",
)


@pytest.fixture(scope="module")
def documents(smollm2_ours: oracle.Ours) -> list[list[int]]:
    found = [smollm2_ours.base.tokenizer.encode(text) for text in TEXTS]
    assert 60 < sum(map(len, found)) < 100
    return found


@pytest.fixture(scope="module")
def logits(smollm2_ours: oracle.Ours, documents: list[list[int]]) -> torch.Tensor:
    return smollm2_ours.logits(documents, adapted=False)


@pytest.mark.thorough
def test_logits_equal_transformers(logits: torch.Tensor, smollm2_theirs: Any, documents: list[list[int]]) -> None:
    with torch.no_grad():
        want = torch.cat([smollm2_theirs(torch.tensor([d])).logits[0] for d in documents])
    assert want.std() > 2, "a model whose logits are all alike proves nothing"
    print(f"largest difference {(logits - want).abs().max():.1e}")
    assert (logits - want).abs().max() < 1e-3  # measured: 0 on one thread, 1e-4 on two; both are 2e-4 from fp64


@pytest.mark.thorough
def test_kept_in_the_file_equals_resident(logits: torch.Tensor, smollm2: Path, documents: list[list[int]]) -> None:
    kept = oracle.ours(smollm2, base_dtype="keep")
    assert quantised.frozen_bytes(kept.decoder) < 110e6, "blocks stay as the file has them"
    difference = (kept.logits(documents, adapted=False) - logits).abs().max()
    print(f"largest difference {difference:.1e}")
    # Products over slices of a table sum in another order: 1e-4 measured, where fp32 itself is 2e-4 from fp64.
    assert difference < 4e-4


def test_every_tensor_of_the_file_is_taken(smollm2: Path, smollm2_ours: oracle.Ours) -> None:
    stored, base = read_gguf(smollm2).tensors, smollm2_ours.base
    assert len(stored) == len(base.tensors) == 272
    taken = Recorder(base.tensors)
    recorded = Base(base.name, base.path, base.kind, base.spec, base.tokenizer, taken)
    oracle.place(recorded, smollm2_ours.lora, "keep")
    assert taken.asked == set(base.tensors)


class Recorder(dict[str, Any]):
    """Tensors by name, with a note of those that were asked for."""

    def __init__(self, tensors: Any):
        super().__init__(tensors)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)


@pytest.mark.thorough
def test_lora_gradients_equal_pefts(smollm2_ours: oracle.Ours, smollm2_theirs: Any, documents: list[list[int]]) -> None:
    """PEFT judges in fp64. SmolLM2's residual stream holds a few huge values, and thirty layers of fp32 rounding beside
    them show: measured against fp64, our worst tensor is 4e-5 off, and PEFT's in fp32 8e-4. The 1e-5 that the formulas
    deserve is held by the tiny models of test_transformers.py."""
    batch = [Example(d[:16], [i >= 4 for i in range(16)]) for d in documents[:2]]
    loss, got = smollm2_ours.gradients(batch)
    model = oracle.peft_model(smollm2_theirs, smollm2_ours).double().train()
    try:
        total = oracle.loss_sum(model, batch)
        total.backward()
        theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    finally:
        model.unload().float().eval()  # the session's model is its own again
    assert loss == pytest.approx(float(total.detach()), rel=1e-5)
    assert len(got) == len(theirs) == 30 * 7 * 2
    worst = max((relative(got[n], theirs[oracle.peft_name(n)]), n) for n in got)
    print(f"largest relative difference {worst[0]:.1e} ({worst[1]})")
    assert worst[0] < 1e-4


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())
