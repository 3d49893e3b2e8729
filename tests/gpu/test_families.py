"""The families that differ from Llama on the GPU: soft caps, windows in some layers, norms around and behind, rope in
parts of heads and in some layers only, fused projections, short convolutions, delta nets. Gradients equal the CPU's,
the captured step is the eager one bit for bit, and nothing waits. The models are made here, from torch alone."""

from __future__ import annotations

import pytest
import torch

from graftune.data.pack import pack
from graftune.model.spec import ModelSpec
from graftune.runtime import resolve
from graftune.session import attention_for
from graftune.settings.sections import LoraConfig
from graftune.step.pipeline import DevicePipeline
from graftune.step.step import Step
from tests.gpu.test_step import SHAPE, documents_stay_apart, examples, never_waits, run
from tests.support import families, oracle, quantised, specs

pytestmark = pytest.mark.gpu
LORA = LoraConfig(rank=4, alpha=8.0, train_norms=True)
SPECS = {variant: families.spec(variant) for variant in families.DIFFERENT} | {"phi3-far": families.far()}
SPECS["options"] = specs.with_options(families.spec("llama-untied"))
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def ready(
    shape: ModelSpec,
    *,
    graph: bool,
    compute: torch.dtype = torch.float32,
    deterministic: bool = True,
    device: str = "cuda",
    base_dtype: str = "",
    **more,
) -> tuple[oracle.Ours, Step, DevicePipeline | None]:
    """The step as a run has it: the backend that `attention_for` chooses, windows where the family has them. (Off the
    GPU there is no loop.)"""
    base = families.base_of(shape)
    ours = quantised.placed(base, LORA, base_dtype or NAMES[compute], device, compute)
    torch.manual_seed(5)
    drawn = torch.randn(len(ours.arena.weights)).mul_(0.05)
    for slot in ours.arena.slots.values():  # norms stay near what they are
        if "norm" in slot.name:
            drawn[slot.start : slot.stop].add_(ours.arena.weights[slot.start : slot.stop].cpu())
    ours.arena.weights.copy_(drawn)
    ours.arena.publish()
    runtime = resolve(device, NAMES[compute], deterministic=deterministic)
    backend = attention_for(base, runtime, SHAPE.longest).backend
    step = Step(ours.decoder, ours.arena, attention_backend=backend, longest=SHAPE.longest, **more)
    return ours, step, DevicePipeline(step, graph) if device == "cuda" else None


def gradients(shape: ModelSpec, device: str, **how) -> tuple[float, dict[str, torch.Tensor]]:
    ours, step, _ = ready(shape, graph=False, device=device, **how)
    step.micro_step(pack(examples(1, 20, 60, 5), shape=SHAPE).to(torch.device(device)))
    return float(step.loss_sum), {n: ours.arena.view(n, ours.arena.grads).cpu() for n in ours.arena.slots}


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "offload"])
@pytest.mark.parametrize("variant", SPECS)
def test_gradients_equal_the_cpus(variant, recompute):
    loss, got = gradients(SPECS[variant], "cuda", recompute=recompute)
    want_loss, want = gradients(SPECS[variant], "cpu")
    assert loss == pytest.approx(want_loss, rel=1e-4)
    for name, grad in want.items():
        assert (got[name] - grad).norm() <= 1e-3 * grad.norm(), name


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", SPECS)
def test_documents_stay_apart(variant, compute, deterministic):
    ours, step, _ = ready(SPECS[variant], graph=False, compute=compute)
    documents_stay_apart(ours.decoder, step.backend)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", SPECS)
def test_captured_is_eager_bit_for_bit(variant, compute, deterministic):
    found = []
    for graph in (True, False):
        ours, step, loop = ready(SPECS[variant], graph=graph, compute=compute, dropout=0.1)
        for i in range(6):
            run(loop, [examples(2 * i, 20, 33 + i), examples(2 * i + 1, 60)], lr=1e-2 / (i + 1))
        figures = [f[1:] for f in loop.finished(wait=True)]
        found.append((figures, ours.arena.weights.clone(), int(step.count)))
        assert loop.captures == (1 if graph else 0)
    (figures, weights, count), (figures_, weights_, count_) = found
    assert figures == figures_ and torch.equal(weights, weights_) and count == count_ == 6


@pytest.mark.parametrize("variant", SPECS)
def test_nothing_waits_and_nothing_is_captured_again(variant):
    never_waits(
        ready(SPECS[variant], graph=True, compute=torch.bfloat16, deterministic=False, dropout=0.1, tuned=True)[2]
    )


@pytest.mark.parametrize("variant", ["gemma2", "phi3", "olmo3", "options", "qwen3_5", "gemma4", "gemma4_unified"])
def test_a_quantised_base_trains_captured(variant):
    losses = []
    for base_dtype in ("bf16", "nf4"):
        loop = ready(SPECS[variant], graph=True, compute=torch.bfloat16, base_dtype=base_dtype)[2]
        for _ in range(12):
            run(loop, [examples(0, 40, 60)], lr=5e-3)
        losses.append([f.loss for f in loop.finished(wait=True)])
        assert loop.captures == 1 and losses[-1][-1] < losses[-1][0]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_a_delta_net_over_the_blocks_of_a_gguf(kind):
    """In the order of heads that a GGUF has: gradients equal the CPU's, and the step is captured."""
    base = quantised.gguf_base(kind, quantised.delta_spec())
    batch = pack(examples(1, 20, 60, 5), shape=SHAPE)
    found = []
    for device, backend in (("cuda", "triton"), ("cpu", "cpu")):
        ours = quantised.placed(base, LORA, "keep", device)
        step = Step(ours.decoder, ours.arena, attention_backend=backend, longest=SHAPE.longest)
        step.micro_step(batch.to(torch.device(device)))
        found.append({n: ours.arena.view(n, ours.arena.grads).cpu() for n in ours.arena.slots})
    for name, grad in found[1].items():
        assert (found[0][name] - grad).norm() <= 1e-3 * grad.norm(), name
    ours = quantised.placed(base, LORA, "keep", "cuda", torch.bfloat16)
    backend = attention_for(base, resolve("cuda", "bf16"), SHAPE.longest).backend
    loop = DevicePipeline(Step(ours.decoder, ours.arena, attention_backend=backend, longest=SHAPE.longest), True)
    for _ in range(12):
        run(loop, [examples(0, 40, 60)], lr=5e-3)
    losses = [f.loss for f in loop.finished(wait=True)]
    assert loop.captures == 1 and losses[-1] < losses[0]
