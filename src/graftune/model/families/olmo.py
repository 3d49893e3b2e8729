"""OLMo 2 and 3: norms behind each part only, and one over all heads of queries and of keys; 3 has windows.

GGUF has one architecture for both: a window tells them apart.
"""

from __future__ import annotations

from typing import Any

from graftune.model.families.common import Family

BEHIND: dict[str, Any] = {
    "norms": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "gguf_names": {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
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
    Family("olmo2", "Olmo2ForCausalLM", defaults={"rms_norm_eps": 1e-5}, **COMMON),
)
