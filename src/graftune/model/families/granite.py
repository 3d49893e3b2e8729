"""Granite: Llama with multipliers on the embedding, the scores, the residual stream and the logits.

Granite 4 without SSM layers has folders of another class, GraniteMoeHybrid, of which only attention and the shared MLP
are used. Its GGUFs are granite's. Granite SWA has windows in three of four layers, and sinks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graftune.errors import GraftuneError
from graftune.model.families.common import Family
from graftune.model.families.layer_thetas import LayerThetas
from graftune.model.families.reading import Config, Getter
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.spec import ModelSpec

COMMON: dict[str, Any] = {
    "defaults": {"attention_multiplier": 1.0},
    "interleaved": ("gguf",),
    "keys": {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    },
}

GRANITE_SWA = {"attention_multiplier": 1.0, "rms_norm_eps": 1e-5, "sliding_window": 128, "tie_word_embeddings": True}


@dataclass(frozen=True)
class Granite4(Family):
    def completed(self, config: Config) -> dict[str, Any]:
        found = super().completed(config)
        return found | {"intermediate_size": found.get("shared_intermediate_size", 1024)}

    def attention(self, get: Getter) -> AttentionSpec:
        config, layers = get.config, get.by_layer(get.config.get("layer_types") or ["mamba"] * get.layers())
        if not {"attention", "full_attention"}.issuperset(layers):
            raise GraftuneError("has Mamba-2 layers", where=get.where, fix="use a Granite without H in its name")
        if config.get("num_local_experts", 8):
            raise GraftuneError("has experts beside the shared MLP", where=get.where, fix="use a dense Granite")
        found = super().attention(get)
        rotated = config.get("position_embedding_type") == "rope"
        return found if rotated else replace(found, rope=replace(found.rope, enabled=False))

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        found = super().config(spec, where)
        return found | {
            "shared_intermediate_size": found["intermediate_size"],
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * len(spec.layers),
            "position_embedding_type": "rope" if spec.ropes[0].enabled else None,
        }


@dataclass(frozen=True)
class GraniteSwa(LayerThetas):
    def attention(self, get: Getter) -> AttentionSpec:
        return replace(super().attention(get), sinks=True)

    def gguf_config(self, metadata: Config, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        config = super().gguf_config(metadata, tensors, where)
        rotated = metadata.get(f"{self.arch}.attention.rope_pattern")
        return config | {"layer_rope_theta": [each * config["rope_theta"] for each in rotated] if rotated else None}

    def gguf_keys(self, spec: ModelSpec, where: str) -> dict[str, Any]:
        rotated = [layer.mixer.ropes[0].enabled for layer in spec.layers]
        return super().gguf_keys(spec, where) | {"attention.rope_pattern": rotated}


GRANITE = (
    Family("granite", "GraniteForCausalLM", **COMMON),
    GraniteSwa(
        "granite_swa",
        "GraniteSWAForCausalLM",
        windows="alternate",
        windows_in_llama_cpp=True,
        gguf_names={"self_attn.sinks": "attn_sinks.weight"},
        **COMMON | {"defaults": GRANITE_SWA},
    ),
    Granite4(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        architecture="granite",
        mlp="shared_mlp",
        mlp_names=("input_linear", "output_linear"),
        gguf_names={"shared_mlp.input_linear": "ffn_gate", "shared_mlp.output_linear": "ffn_down"},
        gguf_parts={"ffn_gate": "ffn_up"},
        **COMMON,
    ),
)
