"""Phi 3: fused projections, rope over a part of each head, and longrope."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graftune.model.families.common import Family
from graftune.model.families.reading import Config


@dataclass(frozen=True)
class Phi3(Family):
    def completed(self, config: Config) -> dict[str, Any]:
        """With longrope under its name: the first checkpoints call it su or yarn."""
        found = super().completed(config)
        scaling = found.get("rope_scaling")
        kind = (scaling or {}).get("rope_type") or (scaling or {}).get("type")
        if scaling and (kind == "su" or (kind == "yarn" and scaling.get("short_factor"))):
            found["rope_scaling"] = dict(scaling) | {"rope_type": "longrope"}
        return found


PHI = (
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
)
