"""LFM2: a short convolution in place of attention in most layers, and names of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graftune.errors import GraftuneError
from graftune.model.families.common import Family
from graftune.model.families.reading import Config, Getter
from graftune.model.feed_forward.gated import GatedSpec
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.mixers.short_conv import ShortConvSpec
from graftune.model.part import FeedForwardSpec, MixerSpec
from graftune.model.spec import ModelSpec


@dataclass(frozen=True)
class Lfm2(Family):
    def completed(self, config: Config) -> dict[str, Any]:
        """With the names that others have for the same, and the feed-forward's width as it comes out."""
        ffn = int(config.get("block_ff_dim") or config.get("intermediate_size") or 0)
        if config.get("block_auto_adjust_ff_dim", True):
            ffn, multiple = int(2 * ffn / 3), int(config.get("block_multiple_of") or 256)
            if config.get("block_ffn_dim_multiplier", 1.0) is not None:
                ffn = math.ceil(int(config.get("block_ffn_dim_multiplier", 1.0) * ffn) / multiple) * multiple
        tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
        named = {"intermediate_size": ffn, "rms_norm_eps": config.get("norm_eps", 1e-5), "tie_word_embeddings": tied}
        return super().completed(config) | named

    def attention(self, get: Getter) -> AttentionSpec:
        return replace(super().attention(get), out="out_proj", qk_norms=("q_layernorm", "k_layernorm"))

    def mixers(self, get: Getter) -> list[MixerSpec]:
        conv, attention = ShortConvSpec(get.whole("hidden_size"), get.whole("conv_L_cache")), self.attention(get)
        if get.config.get("layer_types"):
            kinds = get.by_layer(get.config["layer_types"])
            return [conv if kind == "conv" else attention for kind in kinds]
        attends = get.config.get("full_attn_idxs")
        layers = range(get.layers())
        return [attention if attends is None or index in attends else conv for index in layers]

    def feed_forward(self, get: Getter) -> FeedForwardSpec:
        found = super().feed_forward(get)
        assert isinstance(found, GatedSpec)
        return replace(found, module="feed_forward", names=("w1", "w3", "w2"))

    def gguf_config(self, metadata: Config, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        """A list of key heads has a zero for each layer without attention."""
        config = super().gguf_config(metadata, tensors, where)
        config |= {"norm_eps": config["rms_norm_eps"], "block_auto_adjust_ff_dim": False}
        heads = config.get("num_key_value_heads")
        if not isinstance(heads, list):
            return config
        if len(set(heads) - {0}) != 1:
            raise GraftuneError("has other heads in some layers", where=where, fix="this variant is not supported")
        kinds = ["full_attention" if count else "conv" for count in heads]
        return config | {"num_key_value_heads": max(heads), "layer_types": kinds}

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        found = super().config(spec, where)
        mixers = [layer.mixer for layer in spec.layers]
        taps = {mixer.taps for mixer in mixers if isinstance(mixer, ShortConvSpec)}
        return found | {
            "norm_eps": found["rms_norm_eps"],
            "block_auto_adjust_ff_dim": False,
            "conv_bias": False,
            "conv_L_cache": max(taps, default=self.defaults["conv_L_cache"]),
            "layer_types": ["conv" if isinstance(mixer, ShortConvSpec) else "full_attention" for mixer in mixers],
        }

    def gguf_keys(self, spec: ModelSpec, where: str) -> dict[str, Any]:
        found = super().gguf_keys(spec, where)
        shapes = [layer.mixer.attention for layer in spec.layers]
        return found | {"attention.head_count_kv": [shape.kv_heads if shape else 0 for shape in shapes]}


LFM2 = (
    Lfm2(
        "lfm2",
        "Lfm2ForCausalLM",
        defaults={"rope_theta": 1_000_000.0, "conv_L_cache": 3},
        norms=("operator_norm", None, "ffn_norm", None),
        final_norm="embedding_norm",
        qk_norm=True,
        keys={"conv_L_cache": "shortconv.l_cache"},
        gguf_names={
            "operator_norm": "attn_norm",
            "self_attn.out_proj": "attn_output",
            "self_attn.q_layernorm": "attn_q_norm",
            "self_attn.k_layernorm": "attn_k_norm",
            "conv.in_proj": "shortconv.in_proj",
            "conv.conv": "shortconv.conv",
            "conv.out_proj": "shortconv.out_proj",
            "ffn_norm": "ffn_norm",
            "feed_forward.w1": "ffn_gate",
            "feed_forward.w3": "ffn_up",
            "feed_forward.w2": "ffn_down",
            "embedding_norm": "token_embd_norm",
        },
    ),
)
