"""GLM-4 (0414) and ERNIE 4.5: rope rotates neighbouring values, in folders as in GGUFs. GLM-4 has norms around each
part, gate and up as one projection, and rope over half of each head. GLM-4.5 and later mixtures (glm4_moe) have neither
norms after the parts nor the interleaved rope; the first layers are dense, and scores are sigmoids with a bias of the
choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graftune.model.families.common import Family
from graftune.model.families.mixture import Mixture
from graftune.model.families.reading import FileConfig, Getter
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.spec import ModelSpec


class Glm4(Family):
    """Some of its models have a bias on queries, keys and values, and some have none."""

    def attention(self, get: Getter) -> AttentionSpec:
        return replace(super().attention(get), bias=bool(get.config["attention_bias"]))

    def gguf_config(self, metadata: FileConfig, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().gguf_config(metadata, tensors, where) | {"attention_bias": "blk.0.attn_q.bias" in tensors}

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        return super().config(spec, where) | {"attention_bias": bool(spec.layers[0].mixer.biased)}


class Glm4Moe(Mixture, Glm4):
    """Some of its models have norms on queries and keys."""

    def attention(self, get: Getter) -> AttentionSpec:
        return replace(super().attention(get), qk_norm=bool(get.config["use_qk_norm"]))

    def gguf_config(self, metadata: FileConfig, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().gguf_config(metadata, tensors, where) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        found, mixer = super().config(spec, where), spec.layers[0].mixer
        assert isinstance(mixer, AttentionSpec)
        return found | {"use_qk_norm": mixer.qk_norm, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}


GLM = (
    Glm4(
        "glm4",
        "Glm4ForCausalLM",
        defaults={"attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-07},
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        bias=True,
        mlp_names=("gate_up_proj", "down_proj"),
        partial_rope=True,
        gguf_names={
            "post_self_attn_layernorm": "post_attention_norm",
            "mlp.gate_up_proj": "ffn_up",
            "post_mlp_layernorm": "post_ffw_norm",
        },
        interleaved=("gguf", "folder"),
    ),
    Glm4Moe(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        architecture="glm4moe",
        defaults={
            "attention_bias": False,
            "use_qk_norm": False,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        bias=True,
        partial_rope=True,
        experts_key="n_routed_experts",
        expert_ffn_key="moe_intermediate_size",
        dense_key="first_k_dense_replace",
        shared="mlp.shared_experts",
        shared_count_key="n_shared_experts",
        score="sigmoid",
        selection_bias="gate.e_score_correction_bias",
        sum_eps=1e-20,
        scale_key="routed_scaling_factor",
        llama_cpp_normalises=None,
        dense_by_parameter=True,
        prediction_key="num_nextn_predict_layers",
        keys={
            "moe_intermediate_size": "expert_feed_forward_length",
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
        },
        gguf_names={
            "post_attention_layernorm": "post_attention_norm",
            "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
            "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
            "mlp.shared_experts.up_proj": "ffn_up_shexp",
            "mlp.shared_experts.down_proj": "ffn_down_shexp",
        },
    ),
    Family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        defaults={"tie_word_embeddings": True, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "head_dim": 128},
        interleaved=("gguf", "folder"),
    ),
)
