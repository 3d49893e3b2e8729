"""Projections are identified by their path: a last word may occur in several modules of a layer or of a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graftune.api import export
from graftune.errors import GraftuneError
from graftune.model.feed_forward.gated import GatedSpec
from graftune.model.layer_spec import BranchPart, BranchSpec
from graftune.model.lora import build_arena, target_names, targets_of
from graftune.model.spec import ModelSpec
from graftune.runtime import resolve
from graftune.settings.sections import LoraConfig
from graftune.settings.targets import expand_targets, is_target, ordered_targets
from graftune.weights.adapter import load_adapter
from tests.exporting import models
from tests.exporting.judges import opened
from tests.support import specs
from tests.support.families import spec as spec_of

MLP, SHARED = "mlp.gate_proj", "mlp.shared_expert.gate_proj"


def ambiguous() -> ModelSpec:
    """Llama with a second feed-forward inside the module of the first."""
    spec = spec_of("llama")
    first = spec.layers[0].feed_forward
    assert isinstance(first, GatedSpec)
    second = BranchSpec((BranchPart(replace(first, module="mlp.shared_expert", ffn=24)),))
    layers = tuple(replace(layer, branches=(*layer.branches, second)) for layer in spec.layers)
    return replace(spec, layers=layers)


@pytest.mark.parametrize(
    ("asked", "paths", "names"),
    [
        (("gate_proj",), [MLP, SHARED], ["gate_proj"]),
        (("mlp.gate_proj",), [MLP], [MLP]),
        (("shared_expert.gate_proj", "q_proj"), ["self_attn.q_proj", SHARED], ["q_proj", SHARED]),
        ((MLP, SHARED), [MLP, SHARED], ["gate_proj"]),
    ],
)
def test_a_name_means_all_paths_that_end_in_it(asked: Any, paths: list[str], names: list[str]) -> None:
    spec, lora = ambiguous(), LoraConfig(rank=2, targets=asked)
    assert sorted(targets_of(spec, lora)) == sorted(paths)
    assert list(target_names(spec, paths)) == names
    arena = build_arena(spec, lora, resolve("cpu").device, resolve("cpu").compute)
    assert {name.split(".", 2)[2].partition(".lora_")[0] for name in arena.slots} == set(paths)
    part, inner = spec.part_of(f"layers.1.{SHARED}.weight")
    assert part is spec.layers[1].parts[-1] and inner == "gate_proj.weight"


@pytest.mark.parametrize("variant", ["lfm2", "lfm3", "granitemoehybrid"])
def test_a_part_of_what_the_family_does_not_have_is_refused(variant: str) -> None:
    """They have no gate_proj, and no gate_up_proj that it would be a part of."""
    with pytest.raises(GraftuneError, match=f"{variant} has no gate_proj; use"):
        targets_of(spec_of(variant), LoraConfig(targets=("gate_proj", "q_proj")))


def test_what_a_target_may_be() -> None:
    assert is_target("mlp.w1") and not is_target("mlp.x_proj") and not is_target("layers.0.q_proj")
    assert expand_targets(("mlp.up_proj", "qv")) == ("q_proj", "v_proj", "mlp.up_proj")
    assert ordered_targets({"b.q_proj", "v_proj", "a.q_proj", "q_proj"}) == ("q_proj", "a.q_proj", "b.q_proj", "v_proj")
    with pytest.raises(GraftuneError, match=r"llama has no conv\.q_proj; use q_proj, k_proj"):
        targets_of(spec_of("llama"), LoraConfig(targets=("conv.q_proj",)))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("out_proj", ["out_proj"]),
        ("self_attn.out_proj", ["self_attn.out_proj"]),
        ("w1,conv.out_proj", ["w1", "conv.out_proj"]),
    ],
)
def test_adapters_keep_their_paths_in_every_format(asked: str, named: list[str], tmp_path: Path) -> None:
    """LFM2 has an out_proj in its attention and in its convolutions."""
    folder = models.make_folder("lfm2", tmp_path / "model")
    run = opened(folder, rank=2, targets=asked)
    adapter = run.save(tmp_path / "adapter")
    stored = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    assert sorted(stored) == sorted(named)
    want = load_adapter(adapter)
    assert sorted(want.lora.targets) == sorted(named) and not want.partial
    for to in ("gguf-lora", "apr"):
        back = load_adapter(export(str(adapter), to, out=str(tmp_path / to)).path)
        assert back.lora.targets == want.lora.targets and set(back.tensors) == set(want.tensors), to
    assert set(opened(folder, adapter).parts.arena.slots) == set(run.parts.arena.slots)


def test_experts_are_named_as_peft_does() -> None:
    mixture = specs.made("qwen3_moe", experts=4, chosen=2, layers=1, vocab=300, width=64, ffn=96, heads=4)
    found = targets_of(mixture, LoraConfig(targets=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")))
    assert found == ("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj")
    assert targets_of(spec_of("phi3"), LoraConfig(targets=("gate_up_proj",))) == ("mlp.gate_up_proj",)
