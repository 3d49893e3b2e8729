"""GLM-4 (0414) and ERNIE 4.5: rope turns neighbouring values, in folders as in GGUFs. GLM-4 has norms around each part,
gate and up as one projection, and rope over half of each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graftune.model.families.common import Family
from graftune.model.families.reading import Config, Getter
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.spec import ModelSpec


@dataclass(frozen=True)
class Glm4(Family):
    """Some of its models have a bias on queries, keys and values, and some have none."""

    def attention(self, get: Getter) -> AttentionSpec:
        return replace(super().attention(get), bias=bool(get.config["attention_bias"]))

    def gguf_config(self, metadata: Config, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().gguf_config(metadata, tensors, where) | {"attention_bias": "blk.0.attn_q.bias" in tensors}

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        return super().config(spec, where) | {"attention_bias": bool(spec.layers[0].mixer.biased)}


GLM = (
    Glm4(
        "glm4",
        "Glm4ForCausalLM",
        defaults={"attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-07},
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        bias=True,
        mlp_names=("gate_up_proj", "down_proj"),
        partial_rope=True,
        gguf_names={
            "post_self_attn_layernorm": "post_attention_norm",
            "mlp.gate_up_proj": "ffn_up",
            "post_mlp_layernorm": "post_ffw_norm",
        },
        interleaved=("gguf", "folder"),
    ),
    Family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        defaults={"tie_word_embeddings": True, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "head_dim": 128},
        interleaved=("gguf", "folder"),
    ),
)
