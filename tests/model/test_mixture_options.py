"""Options of mixtures: routers, biases, units and shared experts. Outputs and every gradient against autograd over
plain torch, where every expert computes every token and a mask picks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import gelu, one_hot, silu

from graftune.model.feed_forward.experts import ExpertsSpec
from graftune.model.feed_forward.gated import GatedSpec
from graftune.model.feed_forward.router import RouterSpec
from graftune.model.layer_spec import BranchPart, BranchSpec, LayerSpec
from graftune.settings.sections import LoraConfig
from tests.model.test_branches import LAYERS, MIXING, WIDTH, Reference, Toy, norm, same_as_autograds, toy
from tests.support.pairwise import pairwise

EXPERTS, CHOSEN, FFN = 5, 2, 12
SHARED = GatedSpec(WIDTH, 16, module="mlp.shared_expert")
SIGMOID = {"score": "sigmoid", "selection_bias": "gate.e_score_correction_bias"}


def experts(router: RouterSpec, **options: Any) -> ExpertsSpec:
    return ExpertsSpec(WIDTH, FFN, EXPERTS, CHOSEN, router, **options)


def layer(*parts: Any) -> LayerSpec:
    """All parts read the stream through one norm."""
    return LayerSpec((MIXING, BranchSpec(tuple(BranchPart(part, norm("mlp_norm")) for part in parts))))


MIXTURES = {
    "biases, clamped": layer(experts(RouterSpec(bias=True, name="router"), bias=True, unit="clamped")),
    "sigmoid, shared": layer(experts(RouterSpec(scale=1.5, eps=1e-3, **SIGMOID)), SHARED),
    "gated shared": layer(experts(RouterSpec()), GatedSpec(WIDTH, 16, module="mlp.shared_expert", out_gate=True)),
    "sigmoid, not normalised": layer(experts(RouterSpec(False, "sigmoid", scale=2.0), unit="gelu")),
    "softmax, scaled": layer(experts(RouterSpec(normalised=False, scale=3.0, selection_bias="expert_bias"))),
}


class Mixture(Reference):
    def part(self, spec: Any, x: torch.Tensor, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        stem = f"layers.{layer}.{spec.module}."
        if isinstance(spec, ExpertsSpec):
            return self.mixture(spec, x, stem)
        out = super().part(spec, x, layer, tokens)
        gated = isinstance(spec, GatedSpec) and spec.out_gate
        return out * torch.sigmoid(x @ self.tensor(f"{stem}gate.weight").t()) if gated else out

    def mixture(self, spec: ExpertsSpec, x: torch.Tensor, stem: str) -> torch.Tensor:
        router, weights = spec.router, torch.zeros(len(x), EXPERTS)
        logits = x @ self.tensor(f"{stem}{router.name}.weight").t()
        if router.bias:  # the k largest, then a softmax over them
            logits = logits + self.tensor(f"{stem}{router.name}.bias")
            top = logits.topk(CHOSEN, 1)
            weights = weights.scatter(1, top.indices, top.values.softmax(1))
        else:
            scores = logits.sigmoid() if router.score == "sigmoid" else logits.softmax(1)
            bias = self.tensor(f"{stem}{router.selection_bias}") if router.selection_bias else 0.0
            chosen = one_hot((scores + bias).topk(CHOSEN, 1).indices, EXPERTS).sum(1)
            weights = scores * chosen
            if router.normalised:
                weights = weights / (weights.sum(1, keepdim=True) + router.eps)
            weights = weights * router.scale
        outs = [self.expert(spec, x, f"{stem}experts.", expert) for expert in range(EXPERTS)]
        return torch.einsum("te,etd->td", weights, torch.stack(outs))

    def expert(self, spec: ExpertsSpec, x: torch.Tensor, stem: str, expert: int) -> torch.Tensor:
        weight = {name: self.tensor(f"{stem}{expert}.{name}.weight") for name in spec.projections}
        none = torch.zeros(1)
        bias = {n: self.tensor(f"{stem}{n}.bias")[expert] if spec.bias else none for n in spec.projections}
        gate, up = self.low(x, f"{stem}gate_up_proj", expert).chunk(2, 1)
        gate = gate + x @ weight["gate_proj"].t() + bias["gate_proj"]
        up = up + x @ weight["up_proj"].t() + bias["up_proj"]
        if spec.unit == "clamped":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            act = (up + 1) * gate * torch.sigmoid(gate * 1.702)
        else:
            act = up * (silu(gate) if spec.unit == "silu" else gelu(gate, approximate="tanh"))
        down = act @ weight["down_proj"].t() + bias["down_proj"]
        return down + self.low(act, f"{stem}down_proj", expert)

    def low(self, x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        a, b = (self.trained[f"{name}.lora_{matrix}.weight"] for matrix in "AB")
        return self.scale * (x @ a.unflatten(0, (EXPERTS, -1))[expert].t()) @ b[expert].t()


def made(kind: str, norms: bool = False, deep: bool = True) -> Toy:
    """Layers without a mixture below one that has one, and with `deep` another with one at the bottom."""
    lora = LoraConfig(rank=3, alpha=6.0, targets=("all_linear",), train_norms=norms)
    return toy((*[MIXTURES[kind]] * deep, LAYERS["two branches"], MIXTURES[kind]), lora, full=False)


@pairwise(("kind", MIXTURES), ("norms", [False, True]), ("recompute", ["none", "selective", "full"]))
def test_outputs_and_gradients_are_autograds(kind: str, norms: bool, recompute: str) -> None:
    one = made(kind, norms)
    same_as_autograds(one, Mixture(one), recompute)
