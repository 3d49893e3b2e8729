"""Specs of models in short words, read as their families' configurations, and specs that no configuration has."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from graftune.model.families import FAMILIES, from_config
from graftune.model.layer_spec import LayerSpec
from graftune.model.part import PartSpec
from graftune.model.spec import ModelSpec

WORDS = {
    "layers": "num_hidden_layers", "width": "hidden_size", "ffn": "intermediate_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_width": "head_dim", "vocab": "vocab_size", "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings", "tied": "tie_word_embeddings", "window": "sliding_window",
    "chosen": "num_experts_per_tok",
}  # fmt: skip


def made(family: str = "llama", convolutions: Sequence[int] | None = None, **values: Any) -> ModelSpec:
    """A model of a family; beside the short words, values go by their names in a configuration."""
    config = {WORDS.get(name, name): value for name, value in values.items()} | {"model_type": FAMILIES[family].hf_type}
    if convolutions is not None:
        kinds = ["conv" if index in convolutions else "full_attention" for index in range(values["layers"])]
        config |= {"layer_types": kinds, "norm_eps": values["norm_eps"], "block_auto_adjust_ff_dim": False}
    if "experts" in values:
        config |= {FAMILIES[family].experts_key: values["experts"], "norm_topk_prob": True}
        config |= {"moe_intermediate_size": values["ffn"]}
    return from_config(config, "a test")


def edited(spec: ModelSpec, layers: Collection[int] | None = None, **values: Any) -> ModelSpec:
    """With other values in the parts of these layers, or of all; each part takes those that it has a field for."""
    chosen = range(len(spec.layers)) if layers is None else layers
    found = (_edited(layer, values) if index in chosen else layer for index, layer in enumerate(spec.layers))
    return dataclasses.replace(spec, layers=tuple(found))


def with_options(spec: ModelSpec) -> ModelSpec:
    """Of three layers, each with other options of attention: together they have all of them."""
    rope, width = spec.ropes[0], spec.attention[0].head_width
    slow = dataclasses.replace(rope, temperature=0.1, temperature_length=9)
    spec = edited(spec, qk_norm=True)
    spec = edited(spec, [0], gate="in_q", rope=dataclasses.replace(rope, width=width // 2))
    spec = edited(spec, [1], gate="value", gate_proj="value_gate", rope=slow, norm_after_rope=True, out_bias=True)
    return edited(spec, [2], gate="head", gate_proj="head_gate", v_norm=True, unweighted=("v_norm",), sinks=True)


def _edited(layer: LayerSpec, values: dict[str, Any]) -> LayerSpec:
    branches = []
    for branch in layer.branches:
        parts = (dataclasses.replace(each, part=_part(each.part, values)) for each in branch.parts)
        branches.append(dataclasses.replace(branch, parts=tuple(parts)))
    return dataclasses.replace(layer, branches=tuple(branches))


def _part(part: Any, values: dict[str, Any]) -> PartSpec:
    fitting = {name: value for name, value in values.items() if name in part.__dataclass_fields__}
    if "head_width" in fitting:
        width = fitting["head_width"]
        fitting = {"rope": dataclasses.replace(part.rope, width=width), "score_scale": width**-0.5} | fitting
    return dataclasses.replace(part, **fitting)
