"""Every option of attention's spec, in models that no family has.

The reference is plain torch with autograd in fp32, one document at a time: outputs and every gradient are compared,
with adapters, with trained norms and with every weight trained, for each recompute policy, and generation with a cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from graftune.model.layer_spec import BranchPart, BranchSpec, LayerSpec
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.rotary import RopeSpec
from graftune.settings.sections import LoraConfig
from tests.model.test_branches import EPS, FEEDING, WIDTH, Reference, Toy, norm, same_as_autograds, same_text, toy

PLAIN = AttentionSpec(
    width=WIDTH, heads=4, kv_heads=2, head_width=8, norm_eps=EPS, score_scale=0.4, rope=RopeSpec(8, 100.0)
)
NORMED = replace(PLAIN, qk_norm=True)
PARTLY = RopeSpec(4, 100.0)
SLOWLY = replace(PARTLY, temperature=0.7, temperature_length=3)
OPTIONS = {
    "plain": PLAIN,
    "gate in q": replace(NORMED, gate="in_q", rope=PARTLY),
    "gate in q without norms": replace(PLAIN, gate="in_q"),
    "gate by value": replace(NORMED, gate="value", gate_proj="value_gate", bias=True),
    "gate by head": replace(PLAIN, gate="head", gate_proj="head_gate", window=3),
    "norms after rope": replace(NORMED, norm_after_rope=True, rope=PARTLY),
    "norms without weight": replace(NORMED, unweighted=("q_norm", "k_norm")),
    "norm of v": replace(NORMED, v_norm=True, bias=True, rope=PARTLY),
    "norm of v without weight": replace(NORMED, v_norm=True, unweighted=("v_norm",), norm_after_rope=True),
    "sinks": replace(PLAIN, sinks=True),
    "sinks, window, soft cap": replace(NORMED, sinks=True, window=3, score_cap=2.0, gate="in_q"),
    "scaled by position": replace(PLAIN, rope=RopeSpec(8, 100.0, temperature=0.7, temperature_length=2)),
    "scaled by position, gate": replace(NORMED, gate="in_q", rope=SLOWLY),
    "keys as values": replace(NORMED, v_norm=True, unweighted=("v_norm",), v_from_k=True, rope=PARTLY, window=3),
    "biases": replace(PLAIN, bias=True, out_bias=True, rope=PARTLY),
}

V_NORMED = replace(NORMED, v_norm=True, unweighted=("v_norm",))
OWNER, WIDER = replace(V_NORMED, shares_keys=True), replace(OPTIONS["keys as values"], head_width=6, shares_keys=True)
# Layers that use the keys and values of earlier ones: two kinds, each with two layers behind its owner.
SHARED = {
    "shared keys": (OWNER, replace(V_NORMED, keys_from=0), replace(V_NORMED, keys_from=0, window=3)),
    "shared keys as values, two owners": (
        OWNER,
        WIDER,
        *(replace(V_NORMED, keys_from=0), replace(WIDER, shares_keys=False, keys_from=1)) * 2,
    ),
    "shared keys without norms": (replace(PLAIN, shares_keys=True), replace(PLAIN, keys_from=0)),
}


class OptionsReference(Reference):
    def __init__(self, made: Toy):
        super().__init__(made)
        self.shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of the document that is computed

    def part(self, spec: Any, x: torch.Tensor, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        if not isinstance(spec, AttentionSpec):
            return super().part(spec, x, layer, tokens)
        stem, heads = f"layers.{layer}.{spec.module}.", (spec.heads, spec.kv_heads, spec.kv_heads)
        if spec.keys_from is not None:
            (q,) = self.normed(spec, stem, self.product(x, f"{stem}q_proj").unflatten(1, (spec.heads, -1)))
            q = self.rotated(spec, q.transpose(0, 1))
            return self.mixed(spec, stem, q, *self.shared[spec.keys_from])
        q, k, v = (self.product(x, f"{stem}{name}_proj") for name in ("q", "k", "k" if spec.v_from_k else "v"))
        if spec.bias:
            q, k, v = (y + self.tensor(f"{stem}{n}_proj.bias") for n, y in zip("qkv", (q, k, v), strict=True))
        gate = None
        if spec.gate == "in_q":
            q, gate = q.view(len(x), spec.heads, -1).chunk(2, -1)
            q = q.reshape(len(x), -1)
        elif spec.gate != "none":
            gate = self.product(x, f"{stem}{spec.gate_proj}").view(len(x), spec.heads, -1)
        q, k, v = (y.unflatten(1, (n, -1)).transpose(0, 1) for n, y in zip(heads, (q, k, v), strict=True))
        if not spec.norm_after_rope:
            q, k, v = self.normed(spec, stem, q, k, v)
        q, k = self.rotated(spec, q), self.rotated(spec, k)
        if spec.norm_after_rope:
            q, k, v = self.normed(spec, stem, q, k, v)
        if spec.rope.temperature:
            steps = torch.arange(len(x)) // spec.rope.temperature_length
            q = q * (1 + spec.rope.temperature * torch.log(1.0 + steps))[:, None]
        if spec.shares_keys:
            self.shared[layer] = k, v
        return self.mixed(spec, stem, q, k, v, gate)

    def mixed(
        self,
        spec: AttentionSpec,
        stem: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k, v = (y.repeat_interleave(spec.heads // spec.kv_heads, 0) for y in (k, v))
        scores = q @ k.transpose(1, 2) * spec.score_scale
        if spec.score_cap:
            scores = spec.score_cap * torch.tanh(scores / spec.score_cap)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if spec.window:
            hidden |= torch.ones_like(hidden).tril(-spec.window)
        mixed = (self.softmax(spec, stem, scores.masked_fill(hidden, float("-inf"))) @ v).transpose(0, 1)
        mixed = mixed if gate is None else mixed * gate.sigmoid()
        out = self.product(mixed.flatten(1), f"{stem}o_proj")
        return out + self.tensor(f"{stem}o_proj.bias") if spec.out_bias else out

    def softmax(self, spec: AttentionSpec, stem: str, scores: torch.Tensor) -> torch.Tensor:
        if not spec.sinks:
            return scores.softmax(-1)
        sinks = self.tensor(f"{stem}sinks")[:, None, None].expand(*scores.shape[:2], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]

    def normed(self, spec: AttentionSpec, stem: str, *heads: torch.Tensor) -> list[torch.Tensor]:
        names = [*(spec.qk_norms if spec.qk_norm else (None, None)), "v_norm" if spec.v_norm else None]
        found = []
        for name, x in zip(names, heads, strict=False):
            y = x if name is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
            found.append(y * self.tensor(f"{stem}{name}.weight") if name in spec.norms else y)
        return found

    def rotated(self, spec: AttentionSpec, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1])[:, None] * spec.rope.build().frequencies
        a, b, rest = x.split([spec.rope.width // 2, spec.rope.width // 2, spec.head_width - spec.rope.width], -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest), -1)


def layers(option: str) -> tuple[LayerSpec, ...]:
    specs = SHARED.get(option) or (OPTIONS[option],) * 2
    return tuple(LayerSpec((BranchSpec((BranchPart(spec, norm("input_norm")),)), FEEDING)) for spec in specs)


@pytest.mark.parametrize(
    ("trained", "recompute"),
    [("adapters", "none"), ("adapters and norms", "selective"), ("all weights", "full")],
)
@pytest.mark.parametrize("option", [*OPTIONS, *SHARED])
def test_outputs_and_gradients_are_autograds(option: str, trained: str, recompute: str) -> None:
    lora = LoraConfig(rank=3, alpha=6.0, targets=("all_linear",), train_norms=trained == "adapters and norms")
    made = toy(layers(option), lora, full=trained == "all weights")
    same_as_autograds(made, OptionsReference(made), recompute)


@pytest.mark.parametrize("option", [*OPTIONS, *SHARED])
def test_generation_with_a_cache(option: str) -> None:
    made = toy(layers(option), LoraConfig(rank=3, alpha=6.0, targets=("all_linear",)), full=False)
    same_text(made, OptionsReference(made))
