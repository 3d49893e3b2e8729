"""Qwen 2, with a bias on queries, keys and values; Qwen 3, with a norm on queries and keys, dense and with experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graftune.model.families.common import Family
from graftune.model.spec import ModelSpec


@dataclass(frozen=True)
class Qwen3Moe(Family):
    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        return super().config(spec, where) | {"decoder_sparse_step": 1, "mlp_only_layers": []}


QWEN = (
    Family("qwen2", "Qwen2ForCausalLM", bias=True, windows="configured", layers_of_70b=80),
    Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, windows="configured"),
    Qwen3Moe(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        architecture="qwen3moe",
        qk_norm=True,
        windows="configured",
        experts_key="num_experts",
        expert_ffn_key="moe_intermediate_size",
        keys={"moe_intermediate_size": "expert_feed_forward_length"},
    ),
)
