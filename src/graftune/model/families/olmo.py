"""OLMo 2 and 3: norms behind each part only, and one over all heads of queries and of keys; 3 has windows. OLMoE: norms
before each part, and experts whose weights do not sum to one.

GGUF has one architecture for OLMo 2 and 3: a window tells them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graftune.errors import GraftuneError
from graftune.model.families.common import Family
from graftune.model.families.mixture import Mixture
from graftune.model.families.reading import Getter
from graftune.model.mixers.attention import AttentionSpec

BEHIND: dict[str, Any] = {
    "norms": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "gguf_names": {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}


@dataclass(frozen=True)
class Olmoe(Mixture):
    def attention(self, get: Getter) -> AttentionSpec:
        if get.config.get("clip_qkv") is not None:
            raise GraftuneError("clips queries, keys and values", where=get.where, fix="use a base without clip_qkv")
        return super().attention(get)


COMMON: dict[str, Any] = {"architecture": "olmo2", "qk_norm": True, "wide_qk_norm": True, **BEHIND}
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
        **COMMON,
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
    Family("olmo2", "Olmo2ForCausalLM", defaults={"rms_norm_eps": 1e-5}, **COMMON),
)
