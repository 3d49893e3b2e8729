"""gpt-oss: a mixture in every layer, of experts with biases and a clamped gated unit, stored in MXFP4; attention with
sinks, with biases on all projections, and with a window in every other layer.

The weights of the chosen experts are a softmax over their logits alone, which is the softmax over all of them with
weights that sum to one. YaRN's frequencies are not truncated. GGUF has no key for that, and llama.cpp truncates: its
logits differ a little from those of the model's makers, from the first positions on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graftune.errors import GraftuneError
from graftune.kernels.swiglu.reference import ALPHA, LIMIT
from graftune.model.families.mixture import Mixture
from graftune.model.families.reading import FileConfig, Getter
from graftune.model.feed_forward.experts import ExpertsSpec
from graftune.model.feed_forward.router import RouterSpec
from graftune.model.spec import ModelSpec

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss(Mixture):
    def completed(self, config: FileConfig) -> dict[str, Any]:
        found = super().completed(config)
        if not found.get("rope_parameters") and not found.get("rope_scaling"):
            found["rope_scaling"] = YARN
        return found

    def experts(self, get: Getter) -> ExpertsSpec:
        if (get.number("swiglu_limit", LIMIT), get.number("swiglu_alpha", ALPHA)) != (LIMIT, ALPHA):
            raise GraftuneError(
                f"its experts' unit is not the one with limit {LIMIT:g} and alpha {ALPHA:g}",
                where=get.where,
                fix="this variant is not supported",
            )
        return replace(super().experts(get), unit="clamped", bias=True, interleaved=True)

    def router(self, get: Getter) -> RouterSpec:
        return RouterSpec(normalised=True, bias=True, name="router")

    def gguf_config(self, metadata: FileConfig, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        found = super().gguf_config(metadata, tensors, where)
        return found | {"rope_scaling": found["rope_scaling"] | {"truncate": False}}

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        return super().config(spec, where) | {"swiglu_limit": LIMIT, "swiglu_alpha": ALPHA}


GPT_OSS = (
    GptOss(
        "gpt_oss",
        "GptOssForCausalLM",
        architecture="gpt-oss",
        defaults={"head_dim": 64, "rope_theta": 150_000.0, "rms_norm_eps": 1e-5, "sliding_window": 128},
        bias=True,
        attention_fields={"out_bias": True, "sinks": True},
        windows="alternate",
        pattern=2,
        windows_in_llama_cpp=True,
        truncates_yarn=False,
        experts_key="num_local_experts",
        keys={"intermediate_size": "expert_feed_forward_length"},
        gguf_names={
            "post_attention_layernorm": "post_attention_norm",
            "self_attn.sinks": "attn_sinks.weight",
            "mlp.router": "ffn_gate_inp",
            "mlp.experts.gate_proj": "ffn_gate_exps",
            "mlp.experts.up_proj": "ffn_up_exps",
            "mlp.experts.down_proj": "ffn_down_exps",
        },
    ),
)
