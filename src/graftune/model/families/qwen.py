"""Qwen 2, with a bias on queries, keys and values; Qwen 3, with a norm on queries and keys, dense and with experts; and
the text model of Qwen3-VL, whose rope over three positions is the plain one where there are no images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graftune.model.families.common import Family
from graftune.model.families.mixture import Mixture
from graftune.model.families.reading import Config
from graftune.model.spec import ModelSpec


@dataclass(frozen=True)
class Qwen3Moe(Mixture):
    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        return super().config(spec, where) | {"decoder_sparse_step": 1, "mlp_only_layers": []}


@dataclass(frozen=True)
class Qwen3Vl(Family):
    """transformers has no class for the text model alone, which computes what Qwen 3 does."""

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        return super().config(spec, where) | {"model_type": "qwen3"}

    def gguf_keys(self, spec: ModelSpec, where: str) -> dict[str, Any]:
        """llama.cpp wants the shares of a head that time, height and width rotate, also of a text model."""
        pairs = self.written_ropes(spec)[0].width // 2
        side = pairs * 5 // 16
        return super().gguf_keys(spec, where) | {"rope.dimension_sections": [pairs - 2 * side, side, side, 0]}

    def gguf_vision_keys(self, config: Config) -> dict[str, Any]:
        vision = config.get("vision_config") or {}
        return sections_of(config) | {"n_deepstack_layers": len(vision.get("deepstack_visual_indexes") or ())}


def sections_of(config: Config) -> dict[str, Any]:
    """The shares of a head that time, height and width rotate, as a text-and-vision configuration states them."""
    text = config.get("text_config") or {}
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    found = rope.get("mrope_section")
    return {"rope.dimension_sections": [*found, 0, 0][:4]} if found else {}


QWEN = (
    Family("qwen2", "Qwen2ForCausalLM", bias=True, windows="configured", layers_of_70b=80),
    Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, windows="configured"),
    Qwen3Vl(
        "qwen3_vl",
        "Qwen3ForCausalLM",
        model_type="qwen3_vl_text",
        outer=("qwen3_vl",),
        architecture="qwen3vl",
        defaults={"rope_theta": 500_000.0},
        qk_norm=True,
    ),
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
