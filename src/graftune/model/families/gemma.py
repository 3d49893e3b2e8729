"""Gemma: norms that are stored as weight - 1, and a scaled embedding. Gemma 2 and 3 also have norms after each part and
alternating windows, and Gemma 2 has soft caps on scores and logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graftune.errors import GraftuneError
from graftune.model.families.common import Family
from graftune.model.families.reading import FileConfig, Getter
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.spec import EmbeddingSpec, ModelSpec

AROUND = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
COMMON: dict[str, Any] = {
    "norms": AROUND,
    "norm_offset": 1.0,
    "windows": "alternate",
    "windows_in_llama_cpp": True,
    "keys": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gguf_names": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
DEFAULTS = {
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
# transformers' defaults, which text-and-vision checkpoints on the Hub leave out.
GEMMA3 = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


@dataclass(frozen=True)
class Gemma(Family):
    layers_by_width: int = 0  # llama.cpp divides the scores of a model with so many layers by the root of width / heads
    always_capped: bool = False  # llama.cpp soft-caps the scores of every model of the family

    def completed(self, config: FileConfig) -> dict[str, Any]:
        """The configuration with the activation that "gelu" means in the first checkpoints: the tanh approximation."""
        found = super().completed(config)
        return found | {"hidden_act": "gelu_pytorch_tanh"} if found.get("hidden_act") == "gelu" else found

    def embedding(self, get: Getter) -> EmbeddingSpec:
        return replace(super().embedding(get), scale=math.sqrt(get.whole("hidden_size")))

    def attention(self, get: Getter) -> AttentionSpec:
        found, scalar = super().attention(get), get.config.get("query_pre_attn_scalar")
        return replace(found, score_scale=float(scalar) ** -0.5) if scalar else found

    def gguf_config(self, metadata: FileConfig, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        config = super().gguf_config(metadata, tensors, where)
        config |= {key: config.get(key) for key in CAPS}
        scale = metadata.get(f"{self.arch}.attention.scale")
        scalar = scale**-2 if scale else self.head_width(Getter(config, where, {}))
        if config["num_hidden_layers"] == self.layers_by_width:
            scalar = config["hidden_size"] / config["num_attention_heads"]
        return config | {"query_pre_attn_scalar": scalar}

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        mixer = spec.layers[0].mixer
        assert isinstance(mixer, AttentionSpec)
        return super().config(spec, where) | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": round(mixer.score_scale**-2),
        }

    def gguf_keys(self, spec: ModelSpec, where: str) -> dict[str, Any]:
        capped = spec.head.logit_cap and all(shape.capped for shape in spec.attention)
        if self.always_capped and not capped:
            raise GraftuneError(f"llama.cpp caps the scores of every {self.name}", fix="export to merged or peft")
        return super().gguf_keys(spec, where)


GEMMA = (
    Gemma(
        "gemma",
        "GemmaForCausalLM",
        defaults={"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "head_dim": 256},
        norm_offset=1.0,
    ),
    Gemma(
        "gemma2",
        "Gemma2ForCausalLM",
        defaults=DEFAULTS | CAPS,
        pattern=2,
        layers_by_width=46,
        always_capped=True,
        **COMMON,
    ),
    Gemma(
        "gemma3",
        "Gemma3ForCausalLM",
        model_type="gemma3_text",
        outer=("gemma3",),
        defaults=DEFAULTS | GEMMA3,
        qk_norm=True,
        pattern=6,
        local_rope=True,
        layers_by_width=62,
        **COMMON,
    ),
)
