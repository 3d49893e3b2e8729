"""Hunyuan: norms of queries and keys after rope, and a rope whose base is stretched by a fixed `alpha`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from graftune.model.families.common import Family
from graftune.model.families.reading import Config, Getter
from graftune.model.mixers.attention import AttentionSpec

NORMS = ("query_layernorm", "key_layernorm")


@dataclass(frozen=True)
class Hunyuan(Family):
    def completed(self, config: Config) -> dict[str, Any]:
        """With the base that alpha gives: the configuration calls it dynamic, and it never changes."""
        found = super().completed(config)
        values = dict(found.get("rope_parameters") or found.get("rope_scaling") or {})
        if "dynamic" in (values.get("rope_type"), values.get("type")) and values.get("alpha"):
            width = self.head_width(Getter(found, "", {}))
            base = float(values.get("rope_theta") or found.get("rope_theta") or 10_000.0)
            stretched = base * float(values["alpha"]) ** (width / (width - 2))
            found |= {"rope_parameters": {"rope_type": "default", "rope_theta": stretched}, "rope_scaling": None}
        return found

    def attention(self, get: Getter) -> AttentionSpec:
        return replace(super().attention(get), norm_after_rope=True, qk_norms=NORMS)


HUNYUAN = (
    Hunyuan(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        architecture="hunyuan-dense",
        defaults={"rms_norm_eps": 1e-5},
        qk_norm=True,
        gguf_names={"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
    ),
)
