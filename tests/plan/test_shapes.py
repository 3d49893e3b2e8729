"""The plan's own rules of shapes against torch's, on every operation that rehearsals make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graftune.kernels import rehearsal
from graftune.losses.cross_entropy import Anchored
from graftune.losses.kto import Kto
from graftune.losses.preference import Hinge, Orpo, Robust
from graftune.model.feed_forward.router import RouterSpec
from graftune.plan import Plan, rehearse
from graftune.plan.counting import without_memory
from graftune.plan.job import from_few_layers
from graftune.plan.shapes import RULES
from graftune.settings.sections import LoraConfig
from tests.plan.test_plan import DELTA, Setup, biased, gpu, setup, spec
from tests.support import specs

CAPPED = {"family": "gemma2", "window": 16}
CONVOLVED = {"family": "lfm2", "convolutions": (0, 1)}
SHARED = {"family": "glm4_moe", "experts": 4, "chosen": 2, "first_k_dense_replace": 1}


def clamped(**more: Any) -> Any:
    """Experts with biases and a clamped unit."""
    made = spec(experts=4, chosen=2, family="qwen3_moe", **more)
    return specs.edited(made, router=RouterSpec(bias=True, name="router"), bias=True, unit="clamped")


NEXT = {"family": "qwen3_next", "experts": 4, "chosen": 2, "full_attention_interval": 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip
SETUPS = {
    "gpu": lambda: gpu(asked=(90, 20, 30), new_tokens=8, cache_capacity=100),
    "gpu flash": lambda: gpu(backend="flash", lora=LoraConfig(rank=4, dropout=0.1, train_norms=True)),
    "gpu nf4": lambda: gpu(kind="nf4", clip_mode="layer"),
    "gpu fp8": lambda: gpu(kind="fp8"),
    "gpu, every weight": lambda: gpu(method="full"),
    "gpu fp16": lambda: setup("cuda:0", "fp16", torch.float16),
    "gpu experts": lambda: gpu(spec=spec(experts=4, chosen=2, family="qwen3_moe", width=256)),
    "gpu, caps": lambda: gpu(backend="triton", spec=spec(width=256, **CAPPED)),
    "gpu experts, biases": lambda: gpu(spec=clamped(width=256)),
    "gpu experts, shared": lambda: gpu(spec=spec(width=256, **SHARED)),
    "gpu delta nets, gated shared expert": lambda: gpu(spec=spec(width=256, **NEXT)),
    "cpu experts, biases": lambda: setup(spec=clamped()),
    "cpu delta nets, gated shared expert": lambda: setup(spec=spec(**NEXT), recompute="selective"),
    "cpu experts, shared": lambda: setup(spec=spec(**SHARED)),
    "cpu experts": lambda: setup(spec=spec(experts=4, chosen=2, family="qwen3_moe")),
    "gpu convolutions": lambda: gpu(backend="triton", spec=spec(width=256, **CONVOLVED)),
    "gpu delta nets": lambda: gpu(spec=spec(width=256, **DELTA), asked=(90, 20, 30), new_tokens=8, cache_capacity=100),
    "cpu delta nets": lambda: setup(spec=spec(**DELTA), asked=(90, 20, 30), new_tokens=8, cache_capacity=100),
    "gpu, anchored": lambda: gpu(loss=Anchored(0.1)),
    "gpu, orpo": lambda: gpu(loss=Orpo(), layout=Orpo().fields_of(())),
    "cpu, kto": lambda: setup(loss=Kto(), layout=Kto().fields_of(())),
    "cpu, robust": lambda: setup(loss=Robust(sft_share=0.1), layout=Robust().fields_of(())),
    "cpu, hinge": lambda: setup(loss=Hinge(), layout=Hinge().fields_of(())),
    "cpu convolutions": lambda: setup(spec=spec(**CONVOLVED), asked=(90, 20, 30), new_tokens=8, cache_capacity=100),
    "gpu, softplus": lambda: gpu(loss=Shaped(torch.nn.functional.softplus)),
    "cpu, log-sigmoid": lambda: setup(loss=Shaped(torch.nn.functional.logsigmoid)),
    "cpu, anchored": lambda: setup(loss=Anchored(0.1)),
    "cpu, caps": lambda: setup(spec=spec(**CAPPED), recompute="selective"),
    "cpu": lambda: setup(asked=(90, 20, 30), new_tokens=8, cache_capacity=100),
    "cpu bf16": lambda: setup(kind="bf16", compute=torch.bfloat16, lora=LoraConfig(rank=4, dropout=0.1)),
    "cpu nf4": lambda: setup(kind="nf4"),
    "cpu fp8": lambda: setup(kind="fp8"),
    "cpu, qk norm, bias": lambda: setup(spec=biased(tied=True), clip_mode="layer"),
}


def described(made: Any) -> Any:
    if isinstance(made, torch.Tensor):
        strides = tuple(stride for stride, size in zip(made.stride(), made.shape, strict=True) if size > 1)
        return tuple(made.shape), made.dtype, strides, made.untyped_storage().nbytes()
    return [described(one) for one in made] if isinstance(made, (list, tuple)) else made


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("name", SETUPS)
def test_rules_are_torchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of: Setup = SETUPS[name]()
    seen: dict[str, Any] = {}

    def checked(operation: Any, rule: Any) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            made = rule(*args, **named)
            theirs = operation(*without_memory(args), **named)
            if described(made) != described(theirs):
                seen[str(operation)] = (described(made), described(theirs))
            return made

        return run

    for operation, rule in list(RULES.items()):
        monkeypatch.setitem(RULES, operation, checked(operation, rule))
    assert not rehearse(of).without_rule, "every operation of a step has a rule"
    assert not seen


class Shaped(Anchored):
    """The anchored loss with one more operation over the log-probabilities."""

    def __init__(self, operation: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(0.1)
        self.operation = operation

    def of_log_probs(self, log_probs: torch.Tensor, *rest: Any) -> Any:
        total, figures = super().of_log_probs(log_probs, *rest)
        return total + self.operation(log_probs).sum(), figures


@pytest.mark.few(1)
@pytest.mark.parametrize("of", [gpu, setup])
def test_an_operation_without_a_rule_is_named(of: Callable[..., Setup]) -> None:
    """Once, by the plan; what a preference loss is made of has rules."""
    assert not rehearse(of(loss=Shaped(torch.nn.functional.softplus))).without_rule
    assert not rehearse(of(loss=Shaped(torch.nn.functional.logsigmoid))).without_rule
    few = from_few_layers(of(loss=Shaped(torch.erf)))
    assert few.without_rule == {"aten.erf"}
    (note,) = Plan("cpu", "here", {}, few, 1, {}).notes
    assert "no rule for the memory of aten.erf" in note and Plan("cpu", "here", {}, rehearse(of()), 1, {}).notes == []


@pytest.mark.parametrize("kind", ["bf16", "nf4"])
def test_skipped_experts_are_counted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading is rehearsed with the first two members of a weight and the last; the others only take their memory."""
    of = gpu(kind=kind, spec=spec(experts=8, chosen=2, family="qwen3_moe", width=256))
    few = rehearse(of)
    monkeypatch.setattr(rehearsal, "few", lambda pieces: pieces)
    assert rehearse(of) == few
