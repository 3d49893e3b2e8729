"""Llama, and the families that differ from it by windows, by layers without rope, by their ropes or by experts.

In GGUFs, Mistral's models and Mixtral's have the architecture llama, and other keys tell which of them a file holds.
llama.cpp ignores their windows; the key is written for our own reader, and an export of a model with one says so.
Ministral 3 scales queries by their position. Phi 3 has fused projections, rope over a part of each head, and longrope.
Hunyuan has norms of queries and keys after rope, and a rope whose base is stretched by a fixed `alpha`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graftune.model.families.common import Family
from graftune.model.families.mixture import NUMBERED, Mixture
from graftune.model.families.reading import FileConfig, Getter
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.part import MixerSpec
from graftune.model.rotary import RopeSpec, yarn_attention
from graftune.model.spec import ModelSpec

# Ministral 3's rope where its configuration has none.
MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


class SmolLm3(Family):
    """Leaves rope out of every fourth layer; `no_rope_layers` has a 0 there."""

    def rotated(self, get: Getter) -> list[bool]:
        step = int(get.config.get("no_rope_layer_interval") or 4)
        listed = get.config.get("no_rope_layers") or [(index + 1) % step for index in range(get.layers())]
        return [bool(value) for value in get.by_layer(listed)]

    def windowed(self, get: Getter) -> list[bool]:
        found = super().windowed(get)
        if not any(found) or get.config.get("layer_types"):
            return found
        return [not rotated for rotated in self.rotated(get)] if not all(self.rotated(get)) else found

    def mixers(self, get: Getter) -> list[MixerSpec]:
        found: list[MixerSpec] = []
        for mixer, rotated in zip(super().mixers(get), self.rotated(get), strict=True):
            assert isinstance(mixer, AttentionSpec)
            found.append(mixer if rotated else replace(mixer, rope=replace(mixer.rope, enabled=False)))
        return found

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        rotated = [all(rope.enabled for rope in layer.mixer.ropes) for layer in spec.layers]
        return super().config(spec, where) | {"no_rope_layers": [int(each) for each in rotated]}


class Ministral3(Family):
    """Multiplies queries by 1 + beta * log(1 + position // original length); beta is one of rope's settings."""

    def completed(self, config: FileConfig) -> dict[str, Any]:
        found = super().completed(config)
        stated = any(found.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta"))
        return found if stated else found | {"rope_parameters": MINISTRAL3_ROPE}

    def ropes(self, get: Getter, head_width: int) -> tuple[RopeSpec, RopeSpec]:
        full, local = super().ropes(get, head_width)
        values = get.config.get("rope_parameters") or get.config.get("rope_scaling") or {}
        beta, length = values.get("llama_4_scaling_beta"), values.get("original_max_position_embeddings")
        if not beta:
            return full, local
        full = replace(full, temperature=float(beta), temperature_length=int(length or 0))
        return full, full

    def gguf_config(self, metadata: FileConfig, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        config = super().gguf_config(metadata, tensors, where)
        scaling = config["rope_scaling"]
        scaling["llama_4_scaling_beta"] = metadata.get(f"{self.arch}.attention.temperature_scale")
        if every := metadata.get(f"{self.arch}.rope.scaling.yarn_log_multiplier"):  # llama.cpp divides by its mscale
            scaling["attention_factor"] /= yarn_attention(scaling["factor"], every)
        return config

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        found, rope = super().config(spec, where), spec.ropes[0]
        length = rope.temperature_length or rope.scaling.original_length or spec.max_positions
        values = {"llama_4_scaling_beta": rope.temperature, "original_max_position_embeddings": length}
        return found | {"rope_scaling": {"rope_type": "default"} | (found["rope_scaling"] or {}) | values}

    def gguf_keys(self, spec: ModelSpec, where: str) -> dict[str, Any]:
        return super().gguf_keys(spec, where) | {"attention.temperature_scale": spec.ropes[0].temperature}


class Phi3(Family):
    def completed(self, config: FileConfig) -> dict[str, Any]:
        """Renames the scaling to longrope: the first checkpoints call it su or yarn."""
        found = super().completed(config)
        scaling = found.get("rope_scaling")
        kind = (scaling or {}).get("rope_type") or (scaling or {}).get("type")
        if scaling and (kind == "su" or (kind == "yarn" and scaling.get("short_factor"))):
            found["rope_scaling"] = dict(scaling) | {"rope_type": "longrope"}
        return found


class Hunyuan(Family):
    def completed(self, config: FileConfig) -> dict[str, Any]:
        """Replaces rope's base by the one that `alpha` gives: the configuration calls it dynamic, but it is fixed."""
        found = super().completed(config)
        values = dict(found.get("rope_parameters") or found.get("rope_scaling") or {})
        if "dynamic" in (values.get("rope_type"), values.get("type")) and values.get("alpha"):
            width = self.head_width(Getter(found, "", {}))
            base = float(values.get("rope_theta") or found.get("rope_theta") or 10_000.0)
            stretched = base * float(values["alpha"]) ** (width / (width - 2))
            found |= {"rope_parameters": {"rope_type": "default", "rope_theta": stretched}, "rope_scaling": None}
        return found


LLAMA = (
    Mixture(
        "mixtral",
        "MixtralForCausalLM",
        architecture="llama",
        gguf_marker="expert_count",
        defaults={"norm_topk_prob": True, "rms_norm_eps": 1e-5},
        windows="all",
        experts_key="num_local_experts",
        folder_names=NUMBERED | {".mlp.": ".block_sparse_moe."},
        interleaved=("gguf",),
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        architecture="llama",
        outer=("mistral3",),
        gguf_marker="attention.sliding_window",
        windows="all",
        interleaved=("gguf",),
    ),
    Ministral3(
        "ministral3",
        "Ministral3ForCausalLM",
        architecture="mistral3",
        outer=("mistral3",),
        defaults={"rms_norm_eps": 1e-5},
        windows="all",
        interleaved=("gguf",),
    ),
    Family("llama", "LlamaForCausalLM", interleaved=("gguf",), layers_of_70b=80),
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        bias=True,
        gguf_names={"post_attention_layernorm": "post_attention_norm"},
    ),
    SmolLm3(
        "smollm3",
        "SmolLM3ForCausalLM",
        defaults={"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
        windows="configured",
        interleaved=("gguf",),
    ),
    Phi3(
        "phi3",
        "Phi3ForCausalLM",
        defaults={"rms_norm_eps": 1e-5},
        fused=True,
        mlp_names=("gate_up_proj", "down_proj"),
        windows="all",
        partial_rope=True,
        gguf_names={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    ),
    Hunyuan(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        architecture="hunyuan-dense",
        defaults={"rms_norm_eps": 1e-5},
        qk_norm=True,
        attention_fields={"norm_after_rope": True, "qk_norms": ("query_layernorm", "key_layernorm")},
        gguf_names={"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
    ),
)
