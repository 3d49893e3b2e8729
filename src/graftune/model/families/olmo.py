"""OLMo 2 and 3: norms after each part only, and one over all heads of queries and of keys; 3 has windows. OLMoE: norms
before each part, and experts whose weights do not sum to one. EXAONE 4: norms after each part, and a norm on each head
of queries and keys. Its large model has windows on three of four layers, and no rope on the others.

GGUF has one architecture for OLMo 2 and 3: a window tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graftune.errors import GraftuneError
from graftune.model.families.common import Family
from graftune.model.families.mixture import Mixture
from graftune.model.families.reading import FileConfig, Getter
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.part import MixerSpec

BEHIND: dict[str, Any] = {
    "norms": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "gguf_names": {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}


class Olmoe(Mixture):
    def attention(self, get: Getter) -> AttentionSpec:
        if get.config.get("clip_qkv") is not None:
            raise GraftuneError("clips queries, keys and values", where=get.where, fix="use a base without clip_qkv")
        return super().attention(get)


OLMO2: dict[str, Any] = {"architecture": "olmo2", "qk_norm": True, "wide_qk_norm": True, **BEHIND}


WINDOWED_LAYERS = 64  # llama.cpp gives windows to models with so many layers, and to no others


class Exaone4(Family):
    def completed(self, config: FileConfig) -> dict[str, Any]:
        """The configuration with a window pattern such as LLLG (three local layers, one global) as its length."""
        found = super().completed(config)
        pattern = found.get("sliding_window_pattern")
        if isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G":
            found["sliding_window_pattern"] = len(pattern)
        return found

    def mixers(self, get: Getter) -> list[MixerSpec]:
        found = super().mixers(get)
        if not get.config.get("sliding_window"):
            return found
        attention = self.attention(get)
        unrotated: AttentionSpec = replace(attention, rope=replace(attention.rope, enabled=False))
        return [unrotated if mixer == attention else mixer for mixer in found]

    def gguf_config(self, metadata: FileConfig, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        config = super().gguf_config(metadata, tensors, where)
        if config["num_hidden_layers"] != WINDOWED_LAYERS:
            return config | {"sliding_window": None}
        return config | {"sliding_window": config["sliding_window"] or self.defaults["sliding_window"]}


OLMO = (
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        gguf_marker="attention.sliding_window",
        defaults={"rope_theta": 500_000.0, "rms_norm_eps": 1e-5},
        windows="alternate",
        pattern=4,
        local_rope=True,
        windows_in_llama_cpp=True,
        **OLMO2,
    ),
    Olmoe(
        "olmoe",
        "OlmoeForCausalLM",
        defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        qk_norm=True,
        wide_qk_norm=True,
        experts_key="num_experts",
        llama_cpp_normalises=False,
    ),
    Family("olmo2", "Olmo2ForCausalLM", defaults={"rms_norm_eps": 1e-5}, **OLMO2),
    Exaone4(
        "exaone4",
        "Exaone4ForCausalLM",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
        qk_norm=True,
        windows="alternate",
        pattern=4,
        windows_in_llama_cpp=True,
        **BEHIND,
    ),
)
