"""Granite: Llama with multipliers on the embedding, the scores, the residual stream and the logits."""

from __future__ import annotations

from graftune.model.families.common import Family

GRANITE = (
    Family(
        "granite",
        "GraniteForCausalLM",
        defaults={"attention_multiplier": 1.0},
        interleaved=True,
        keys={
            "embedding_multiplier": "embedding_scale",
            "attention_multiplier": "attention.scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
)
