"""LFM2: a short convolution in place of attention in most layers, and tensor names of its own; lfm2_moe has experts
after the first layers. LFM3: windows in some of the other layers, a gate for each head, and norms after each part
too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graftune.errors import GraftuneError
from graftune.model.families.common import Family
from graftune.model.families.mixture import NUMBERED, Mixture, experts_of
from graftune.model.families.reading import FileConfig, Getter
from graftune.model.feed_forward.router import RouterSpec
from graftune.model.layer_spec import NormSpec
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.mixers.short_conv import ShortConvSpec
from graftune.model.part import MixerSpec
from graftune.model.spec import ModelSpec

FEED_FORWARD: dict[str, Any] = {"mlp": "feed_forward", "mlp_names": ("w1", "w3", "w2")}
NAMES = {
    "operator_norm": "attn_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "embedding_norm": "token_embd_norm",
}
# LFM3's defaults: the kinds of layers, which repeat every four (except that the first layer is a convolution), and the
# ropes.
LFM3_KINDS = ("sliding_attention", "conv", "full_attention", "conv")
LFM3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


class Lfm2(Family):
    def completed(self, config: FileConfig) -> dict[str, Any]:
        """The configuration with the common names of its keys, and with the feed-forward's adjusted width."""
        ffn = int(config.get("block_ff_dim") or config.get("intermediate_size") or 0)
        if config.get("block_auto_adjust_ff_dim", True):
            ffn, multiple = int(2 * ffn / 3), int(config.get("block_multiple_of") or 256)
            if config.get("block_ffn_dim_multiplier", 1.0) is not None:
                ffn = math.ceil(int(config.get("block_ffn_dim_multiplier", 1.0) * ffn) / multiple) * multiple
        tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
        named = {"intermediate_size": ffn, "rms_norm_eps": config.get("norm_eps", 1e-5), "tie_word_embeddings": tied}
        return super().completed(config) | named

    def kinds(self, get: Getter) -> list[str]:
        """The kind of each layer; all kinds but conv are attention."""
        if get.config.get("layer_types"):
            return get.by_layer(get.config["layer_types"])
        attends = get.config.get("full_attn_idxs")
        return ["full_attention" if attends is None or index in attends else "conv" for index in range(get.layers())]

    def mixers(self, get: Getter) -> list[MixerSpec]:
        conv = ShortConvSpec(get.whole("hidden_size"), get.whole("conv_L_cache"))
        pairs = zip(self.kinds(get), super().mixers(get), strict=True)
        return [conv if kind == "conv" else attention for kind, attention in pairs]

    def gguf_config(self, metadata: FileConfig, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        """A GGUF may list the key heads of each layer, with a zero for layers without attention."""
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


class Lfm2Moe(Mixture, Lfm2):
    """LFM2 with experts. Its configuration states the feed-forward's width without LFM2's adjustment."""

    def completed(self, config: FileConfig) -> dict[str, Any]:
        return super().completed(dict(self.defaults) | dict(config) | {"block_auto_adjust_ff_dim": False})

    def router(self, get: Getter) -> RouterSpec:
        found = super().router(get)
        return found if get.config["use_expert_bias"] else replace(found, selection_bias="")

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        return super().config(spec, where) | {"use_expert_bias": bool(experts_of(spec).router.selection_bias)}

    def gguf_keys(self, spec: ModelSpec, where: str) -> dict[str, Any]:
        router = experts_of(spec).router
        if not router.selection_bias or router.scale != 1:
            raise GraftuneError(
                "llama.cpp knows this family only with a bias of the router and without a scale of the experts",
                where=where,
                fix="export to merged or peft",
            )
        return super().gguf_keys(spec, where)


class Lfm3(Lfm2):
    def completed(self, config: FileConfig) -> dict[str, Any]:
        """The configuration with defaults, among them transformers' rope for each kind of layer."""
        found = dict(self.defaults) | dict(config)
        return found | {"rms_norm_eps": found["norm_eps"], "rope_parameters": found.get("rope_parameters") or LFM3_ROPE}

    def layer_norms(self, get: Getter) -> tuple[NormSpec | None, ...]:
        found = super().layer_norms(get)
        return found if get.config["use_sandwich_norm"] else (found[0], None, found[2], None)

    def attention(self, get: Getter) -> AttentionSpec:
        gate = "head" if get.config["use_attention_gate"] else "none"
        return replace(super().attention(get), gate=gate)

    def kinds(self, get: Getter) -> list[str]:
        usual = [LFM3_KINDS[index % 4] if index else "conv" for index in range(get.layers())]
        return get.by_layer(get.config.get("layer_types") or usual, LFM3_KINDS)

    def windowed(self, get: Getter) -> list[bool]:
        return [kind == "sliding_attention" for kind in self.kinds(get)]

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        shapes = [layer.mixer.attention for layer in spec.layers]
        kinds = [shape and ("sliding_attention" if shape.window else "full_attention") for shape in shapes]
        attention = next(layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec))
        return super().config(spec, where) | {
            "layer_types": [kind or "conv" for kind in kinds],
            "use_sandwich_norm": spec.layers[0].branches[0].parts[0].out_norm is not None,
            "use_attention_gate": attention.gate == "head",
        }


LFM2_ATTENTION = {"out": "out_proj", "qk_norms": ("q_layernorm", "k_layernorm")}
CONV_KEYS = {"conv_L_cache": "shortconv.l_cache"}
LFM2_NAMES = NAMES | {
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
}
LFM2_COMMON: dict[str, Any] = {
    "norms": ("operator_norm", None, "ffn_norm", None),
    "final_norm": "embedding_norm",
    "qk_norm": True,
    **FEED_FORWARD,
}
LFM2 = (
    Lfm2(
        "lfm2",
        "Lfm2ForCausalLM",
        defaults={"rope_theta": 1_000_000.0, "conv_L_cache": 3},
        attention_fields=LFM2_ATTENTION,
        keys=CONV_KEYS,
        gguf_names=LFM2_NAMES,
        **LFM2_COMMON,
    ),
    Lfm2Moe(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        architecture="lfm2moe",
        attention_fields=LFM2_ATTENTION,
        defaults={
            "rope_theta": 1_000_000.0,
            "conv_L_cache": 3,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "use_expert_bias": True,
        },
        experts_key="num_experts",
        expert_ffn_key="moe_intermediate_size",
        dense_key="num_dense_layers",
        score="sigmoid",
        selection_bias="expert_bias",
        sum_eps=1e-6,
        scale_key="routed_scaling_factor",
        keys=CONV_KEYS
        | {
            "moe_intermediate_size": "expert_feed_forward_length",
            "num_dense_layers": "leading_dense_block_count",
        },
        folder_names=NUMBERED,
        gguf_names=LFM2_NAMES | {"feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b.bias"},
        **LFM2_COMMON,
    ),
    Lfm3(
        "lfm3",
        "Lfm3ForCausalLM",
        defaults={
            "norm_eps": 1e-5,
            "conv_L_cache": 7,
            "head_dim": 128,
            "sliding_window": 256,
            "tie_word_embeddings": True,
            "use_sandwich_norm": True,
            "use_attention_gate": True,
        },
        norms=("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
        final_norm="embedding_norm",
        qk_norm=True,
        attention_fields={"gate_proj": "g_proj"},
        **FEED_FORWARD,
        local_rope=True,
        in_llama_cpp=False,
        # Folders name the gate's projection gate_proj; transformers' module, and PEFT with it, names it g_proj.
        folder_names={".self_attn.g_proj.": ".self_attn.gate_proj."},
        gguf_names=NAMES
        | {
            "self_attn.g_proj": "attn_gate",
            "post_operator_norm": "post_attention_norm",
            "post_ffn_norm": "post_ffw_norm",
        },
    ),
)
