"""Granite: Llama with multipliers on the embedding, the scores, the residual stream and the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graftune.model.families.common import Family, uniform
from graftune.model.families.reading import Config, Getter
from graftune.model.layer_spec import NormSpec
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.spec import EmbeddingSpec, HeadSpec, ModelSpec


@dataclass(frozen=True)
class Granite(Family):
    def embedding(self, get: Getter) -> EmbeddingSpec:
        return replace(super().embedding(get), scale=get.number("embedding_multiplier", 1.0))

    def attention(self, get: Getter) -> AttentionSpec:
        return replace(super().attention(get), score_scale=get.number("attention_multiplier", 1.0))

    def residual_scale(self, get: Getter) -> float:
        return get.number("residual_multiplier", 1.0)

    def head(self, get: Getter, norm: NormSpec) -> HeadSpec:
        return replace(super().head(get, norm), logit_scale=1.0 / get.number("logits_scaling", 1.0))

    def gguf_config(self, metadata: Config, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        """llama.cpp divides the scores by the root of a head's width where a file has no scale."""
        config = super().gguf_config(metadata, tensors, where)
        scale = config.get("attention_multiplier") or self.head_width(Getter(config, where, {})) ** -0.5
        return config | {"attention_multiplier": scale}

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        attention, _ = uniform(spec, where)
        return super().config(spec, where) | {
            "embedding_multiplier": float(spec.embedding.scale),
            "attention_multiplier": float(attention.score_scale),
            "residual_multiplier": float(spec.layers[0].branches[0].scale),
            "logits_scaling": 1.0 / spec.head.logit_scale,
        }


GRANITE = (
    Granite(
        "granite",
        "GraniteForCausalLM",
        interleaved=True,
        keys={
            "embedding_multiplier": "embedding_scale",
            "attention_multiplier": "attention.scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
)
