"""A kind of layer that no family here has: how its tensors are stored and initialised, and what its layers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graftune.batch import Example
from graftune.data.pack import pack
from graftune.losses import Anchored
from graftune.model.frozen.interface import TensorRows
from graftune.model.layer_spec import LayerSpec
from graftune.model.lora import build_arena, start_from_scratch
from graftune.model.mixers.attention import Attention
from graftune.model.mixers.short_conv import ShortConvSpec
from graftune.model.spec import ModelSpec
from graftune.settings.sections import LoraConfig
from graftune.step.step import Step
from graftune.weights import rows
from tests.support import oracle, specs

CPU = torch.device("cpu")


@dataclass(frozen=True)
class DeltaSpec(ShortConvSpec):
    """A gated delta net's tensors: a convolution under another name, decay rates, a norm that is stored as it is."""

    module: str = "linear_attn"

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {"conv1d.weight": (self.width, 1, self.taps), "A_log": (4,), "dt_bias": (4,)}

    @property
    def norms(self) -> dict[str, int]:
        return {"norm": 8, "k_norm": 8}

    def norm_offset_of(self, name: str) -> float:
        return 1.0 if name == "k_norm" else 0.0

    def start_of(self, name: str, generator: torch.Generator) -> torch.Tensor | None:
        if name == "A_log":
            return torch.empty(4).uniform_(1, 16, generator=generator).log()
        return torch.full((4,), 0.5) if name == "dt_bias" else None


def with_delta(spec: ModelSpec) -> ModelSpec:
    """The first layer's mixer is a gated delta net."""
    mixing, feeding = spec.layers[0].branches
    delta = replace(mixing, parts=(replace(mixing.parts[0], part=DeltaSpec(spec.width, 4)),))
    return replace(spec, layers=(LayerSpec((delta, feeding)), *spec.layers[1:]))


SPEC = with_delta(specs.edited(specs.made(
    "gemma2", layers=2, width=16, ffn=24, heads=2, kv_heads=1, head_width=8, vocab=30, norm_eps=1e-5,
    rope_theta=1e4, max_positions=64, tied=True,
), bias=True))  # fmt: skip


def test_tensors_of_its_own_start_as_it_says() -> None:
    arena = build_arena(SPEC, LoraConfig(), CPU, torch.float32, full=True)
    start_from_scratch(arena, SPEC, seed=3)
    started = {name: arena.view(name, arena.weights) for name in arena.slots}
    decay = started["layers.0.linear_attn.A_log"]
    assert len(decay.unique()) == 4 and decay.min() >= 0 and decay.max() <= torch.tensor(16.0).log()
    assert started["layers.0.linear_attn.dt_bias"].tolist() == [0.5] * 4
    assert started["layers.0.linear_attn.norm.weight"].tolist() == [1.0] * 8
    assert started["layers.1.self_attn.q_proj.bias"].tolist() == [0.0] * 16
    inner = started["layers.0.linear_attn.in_proj.weight"].std()
    for name in ("layers.0.linear_attn.out_proj", "layers.1.self_attn.o_proj", "layers.1.mlp.down_proj"):
        assert started[f"{name}.weight"].std() == pytest.approx(float(inner) / 2, rel=0.2), "it writes to the stream"


def test_its_norms_and_shapes_are_stored_as_it_says() -> None:
    names = ("layers.0.linear_attn.norm", "layers.0.linear_attn.k_norm", "layers.1.input_layernorm", "norm")
    stored = {f"{name}.weight": TensorRows(torch.zeros(8)) for name in names}
    read = {name: rows.from_file(t, "folder", SPEC, name) for name, t in stored.items()}
    assert [float(t.values()[0]) for t in read.values()] == [0.0, 1.0, 1.0, 1.0]
    for name, tensor in read.items():
        assert rows.to_file(tensor, "folder", SPEC, name) is stored[name], "unchanged: the file's own bytes"
        trained = rows.to_file(TensorRows(tensor.values()), "folder", SPEC, name)
        assert float(trained.values()[0]) == 0.0
    taps = "layers.0.linear_attn.conv1d.weight"
    assert rows.shapes_of(SPEC, taps) == ((16, 1, 4), (16, 4))
    for name in ("layers.0.linear_attn.A_log", "layers.1.linear_attn.conv1d.weight", "layers.9.mlp.up_proj.weight", ""):
        assert rows.shapes_of(SPEC, name) is None
    assert rows.order_in("gguf", SPEC, "layers.0.linear_attn.in_proj.weight") is None


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layer_stores_something_for_later_layers(
    recompute: str, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there in the forward and the backward of its own pass; the pass of the reference has its own."""
    forward, backward, told, passes = Attention.forward, Attention.backward, list[int](), dict[int, bool]()

    def leaving(self: Attention, entry: Any, run: Any) -> Any:
        if self.layer == 0:
            run.shared[0] = run.adapted
        assert run.shared == {0: run.adapted}
        passes[id(run.shared)] = run.adapted
        return forward(self, entry, run)

    def told_back(self: Attention, grad: Any, ready: Any, read: Any, saved: Any, run: Any, need: bool) -> Any:
        assert run.shared == {0: True}
        if self.layer:
            run.shared_grads[0] = run.shared_grads.get(0, 0) + 1
        else:
            told.append(run.shared_grads[0])
        return backward(self, grad, ready, read, saved, run, need)

    monkeypatch.setattr(Attention, "forward", leaving)
    monkeypatch.setattr(Attention, "backward", told_back)
    ours = oracle.ours(tiny_folder("llama"))
    step = Step(ours.decoder, ours.arena, loss=Anchored(0.1), recompute=recompute)
    batch = pack([Example([3, 4, 5, 6, 7], [False, False, True, True, True])])
    for _ in range(2):
        step.micro_step(batch)
    later = len(ours.decoder.blocks) - 1
    assert told == [later, later] and sorted(passes.values())[0] is False
