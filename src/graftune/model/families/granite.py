"""Granite: Llama with multipliers on the embedding, the scores, the residual stream and the logits.

Granite 4 without SSM layers has folders of another class, GraniteMoeHybrid, of which only attention and the shared MLP
are used. Its GGUFs have the architecture granite. Granite SWA has windows in three of four layers, and sinks; its
configurations list the base of each layer's rope (`LayerThetas`), as Muse Glimmer's do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graftune.errors import GraftuneError
from graftune.model.families.common import Family
from graftune.model.families.reading import FileConfig, Getter
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.part import MixerSpec
from graftune.model.spec import ModelSpec


@dataclass(frozen=True)
class LayerThetas(Family):
    """A family that lists the rope base of each layer; 0 means no rope. By default every fourth layer has no window."""

    from_last: bool = False  # every fourth layer is counted from the last one, not from the first
    rope_with_window: bool = False  # by default, layers without a window have no rope

    def windowed(self, get: Getter) -> list[bool]:
        if get.config.get("layer_types"):
            return [kind == "sliding_attention" for kind in get.by_layer(get.config["layer_types"])]
        found = [index % 4 != 0 for index in range(get.layers())]
        return found[::-1] if self.from_last else found

    def mixers(self, get: Getter) -> list[MixerSpec]:
        windowed, listed = self.windowed(get), get.config.get("layer_rope_theta")
        thetas = (
            get.by_layer(listed) if listed else [has_window or not self.rope_with_window for has_window in windowed]
        )
        found: list[MixerSpec] = []
        for mixer, theta in zip(super().mixers(get), thetas, strict=True):
            assert isinstance(mixer, AttentionSpec)
            base = float(theta) if listed and theta else mixer.rope.theta
            found.append(replace(mixer, rope=replace(mixer.rope, theta=base, enabled=bool(theta))))
        return found

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        ropes = [layer.mixer.ropes[0] for layer in spec.layers]
        return super().config(spec, where) | {"layer_rope_theta": [rope.theta if rope.enabled else 0 for rope in ropes]}

    def gguf_keys(self, spec: ModelSpec, where: str) -> dict[str, Any]:
        shapes = [layer.mixer.attention for layer in spec.layers]
        pattern = [shape is not None and shape.window > 0 for shape in shapes]
        return super().gguf_keys(spec, where) | {"attention.sliding_window_pattern": pattern}


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


class Granite4(Family):
    def completed(self, config: FileConfig) -> dict[str, Any]:
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


class GraniteSwa(LayerThetas):
    def gguf_config(self, metadata: FileConfig, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
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
        attention_fields={"sinks": True},
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
