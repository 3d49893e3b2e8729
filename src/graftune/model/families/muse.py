"""Muse Glimmer, the text model of a text-and-vision checkpoint: embeddings with a norm, gates on attention's output,
norms around each part, and logits that are scaled and then capped.

Norms of queries and keys have no weight, and queries are multiplied by a constant after their norm; here it is a factor
of the scores. A GGUF states the constant as a weight of these norms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.model.families.gemma import AROUND
from graftune.model.families.granite import LayerThetas
from graftune.model.families.reading import FileConfig, Getter
from graftune.model.layer_spec import NormSpec
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.spec import EmbeddingSpec, ModelSpec


class MuseGlimmer(LayerThetas):
    def completed(self, config: FileConfig) -> dict[str, Any]:
        found = super().completed(config)
        return found | {"logits_scaling": 1.0 / float(found["output_multiplier"])}

    def embedding(self, get: Getter) -> EmbeddingSpec:
        return replace(super().embedding(get), norm_eps=get.number("rms_norm_eps", 1e-5))

    def layer_norms(self, get: Getter) -> tuple[NormSpec | None, ...]:
        before, behind, before_mlp, behind_mlp = super().layer_norms(get)
        assert behind is not None and behind_mlp is not None
        eps = get.number("post_norm_eps", 1e-8)
        return before, replace(behind, eps=eps), before_mlp, replace(behind_mlp, eps=eps)

    def head_norm(self, get: Getter) -> NormSpec:
        return replace(super().head_norm(get), offset=0.0)

    def attention(self, get: Getter) -> AttentionSpec:
        found = super().attention(get)
        scale = found.score_scale * get.number("qk_scale_factor", 3.87)
        return replace(found, score_scale=scale, gate="value", unweighted=found.qk_norms)

    def gguf_config(self, metadata: FileConfig, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        config = super().gguf_config(metadata, tensors, where)
        queries, keys = (
            {
                value
                for name, t in tensors.items()
                if name.endswith(f"attn_{x}_norm.weight")
                for value in t.values().tolist()
            }
            for x in "qk"
        )
        if len(queries) != 1 or keys != {1.0}:
            raise GraftuneError(
                "has norms of queries and keys that are no constants", where=where, fix="this variant is not supported"
            )
        return config | {"qk_scale_factor": queries.pop()}

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        mixer, behind = spec.layers[0].mixer, spec.layers[0].branches[0].parts[0].out_norm
        assert isinstance(mixer, AttentionSpec) and behind is not None
        return super().config(spec, where) | {
            "hidden_activation": "silu",
            "qk_scale_factor": mixer.score_scale * mixer.head_width**0.5,
            "output_multiplier": spec.head.logit_scale,
            "post_norm_eps": behind.eps,
        }

    def gguf_tensors(self, spec: ModelSpec) -> dict[str, torch.Tensor]:
        found = super().gguf_tensors(spec)
        for index, layer in enumerate(spec.layers):
            assert isinstance(layer.mixer, AttentionSpec)
            width = layer.mixer.head_width
            factor = layer.mixer.score_scale * width**0.5
            found |= {f"blk.{index}.attn_q_norm.weight": torch.full((width,), factor)}
            found |= {f"blk.{index}.attn_k_norm.weight": torch.ones(width)}
        return found

    def is_gguf_only(self, name: str) -> bool:
        return super().is_gguf_only(name) or re.fullmatch(r"blk\.\d+\.attn_[qk]_norm\.weight", name) is not None


MUSE = (
    MuseGlimmer(
        "muse_glimmer",
        "MuseGlimmerForConditionalGeneration",
        model_type="muse_glimmer_text",
        architecture="muse-glimmer",
        outer=("muse_glimmer",),
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": 2048,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.19611613513818404,
        },
        norms=AROUND,
        norm_offset=1.0,
        qk_norm=True,
        windows="alternate",
        windows_in_llama_cpp=True,
        from_last=True,
        rope_with_window=True,
        keys={"final_logit_softcapping": "final_logit_softcapping", "output_multiplier": "logit_scale"},
        gguf_names={
            "self_attn.gate_proj": "attn_gate",
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        interleaved=("gguf",),
    ),
)
