"""Qwen 2, with a bias on queries, keys and values; Qwen 3, with a norm on queries and keys, dense and with experts; and
the text model of Qwen3-VL, whose rope over three positions is the plain one where there are no images.

Qwen 3.5, dense and with experts, and Qwen3-Next: gated delta nets in most layers, a gate on attention's output, norms
that are stored as weight - 1, and in the mixtures a shared expert with a gate. Qwen3-Next's folders hold the inputs of
a delta net by key head in two projections; its GGUFs have q, k and v in one tensor and z in another, in the engine's
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.model.families.common import Family
from graftune.model.families.mixture import Mixture
from graftune.model.families.reading import FileConfig, Getter
from graftune.model.mixers.gated_delta import DeltaHeads, GatedDeltaSpec
from graftune.model.part import MixerSpec
from graftune.model.spec import ModelSpec


class Qwen3Moe(Mixture):
    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        return super().config(spec, where) | {"decoder_sparse_step": 1, "mlp_only_layers": []}


class Qwen3Vl(Family):
    """transformers has no class for the text model alone, which computes what Qwen 3 does."""

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        return super().config(spec, where) | {"model_type": "qwen3"}

    def gguf_keys(self, spec: ModelSpec, where: str) -> dict[str, Any]:
        """llama.cpp wants, even for a text model, how many of rope's frequencies rotate by time, height and width."""
        pairs = self.written_ropes(spec)[0].width // 2
        side = pairs * 5 // 16
        return super().gguf_keys(spec, where) | {"rope.dimension_sections": [pairs - 2 * side, side, side, 0]}

    def gguf_vision_keys(self, config: FileConfig) -> dict[str, Any]:
        vision = config.get("vision_config") or {}
        return sections_of(config) | {"n_deepstack_layers": len(vision.get("deepstack_visual_indexes") or ())}


def sections_of(config: FileConfig) -> dict[str, Any]:
    """How many of rope's frequencies rotate by time, height and width, by a text-and-vision configuration."""
    text = config.get("text_config") or {}
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    found = rope.get("mrope_section")
    return {"rope.dimension_sections": [*found, 0, 0][:4]} if found else {}


LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class QwenDelta(Family):
    by_key_head: bool = False  # GatedDeltaSpec.by_key_head
    tiled_in_gguf: bool = False  # GatedDeltaSpec.tiled

    def delta(self, get: Getter) -> GatedDeltaSpec:
        sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        return GatedDeltaSpec(
            get.whole("hidden_size"),
            DeltaHeads(*(get.whole(f"linear_{size}") for size in sizes)),
            get.whole("linear_conv_kernel_dim"),
            get.number("rms_norm_eps", 1e-6),
            tiled=bool(get.config.get("tiled")),  # never in a config.json: see gguf_config
            by_key_head=self.by_key_head,
        )

    def mixers(self, get: Getter) -> list[MixerSpec]:
        attention, delta = self.attention(get), self.delta(get)
        kinds = get.config.get("layer_types") or _spaced(get.layers(), get.whole("full_attention_interval"))
        return [delta if kind == LINEAR else attention for kind in get.by_layer(kinds, (LINEAR, FULL))]

    def gguf_config(self, metadata: FileConfig, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        """A GGUF states the width of all value heads together, not that of one."""
        config = super().gguf_config(metadata, tensors, where)
        inner, heads = metadata.get(f"{self.arch}.ssm.inner_size"), config.get("linear_num_value_heads")
        if inner and heads:
            config["linear_value_head_dim"] = inner // heads
        kinds = [LINEAR if f"blk.{index}.ssm_a" in tensors else FULL for index in range(config["num_hidden_layers"])]
        return config | {"tiled": self.tiled_in_gguf, "layer_types": kinds}

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        found = super().config(spec, where)
        mixers = [layer.mixer for layer in spec.layers]
        delta = next((mixer for mixer in mixers if isinstance(mixer, GatedDeltaSpec)), None)
        if delta is not None:
            found |= {
                "linear_conv_kernel_dim": delta.taps,
                "linear_num_key_heads": delta.heads.key_heads,
                "linear_num_value_heads": delta.heads.value_heads,
                "linear_key_head_dim": delta.heads.key_width,
                "linear_value_head_dim": delta.heads.value_width,
            }
        rope = {"rope_type": "default", "rope_theta": found["rope_theta"]} | (found.pop("rope_scaling") or {})
        share = {"partial_rotary_factor": found.pop("partial_rotary_factor", 1.0)}
        kinds = [LINEAR if isinstance(mixer, GatedDeltaSpec) else FULL for mixer in mixers]
        return found | {"rope_parameters": rope | share, "layer_types": kinds, "attn_output_gate": True}

    def gguf_keys(self, spec: ModelSpec, where: str) -> dict[str, Any]:
        found, kinds = super().gguf_keys(spec, where), self.config(spec, where)["layer_types"]
        every = kinds.index(FULL) + 1
        heads = {mixer.heads for layer in spec.layers if isinstance(mixer := layer.mixer, GatedDeltaSpec)}
        if (
            kinds != _spaced(len(kinds), every)
            or len(heads) > 1
            or any(one.key_width != one.value_width for one in heads)
        ):
            raise GraftuneError(
                "llama.cpp knows this family only with attention in every n-th layer and with key and value heads of"
                " one width",
                where=where,
                fix="export to merged or peft",
            )
        if heads:
            found["ssm.inner_size"] = heads.pop().values
        return found | {"full_attention_interval": every}


class Qwen35(QwenDelta):
    """Qwen 3.5, 3.6 and 3.8. Rope's positions of images have three coordinates (`sections`), which are all the same
    for text. GGUFs store one value head of every key head in turn."""

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        found = super().config(spec, where)
        images = {"mrope_interleaved": True, "mrope_section": self.sections(spec)[:3]}
        return found | {"rope_parameters": found["rope_parameters"] | images}

    def sections(self, spec: ModelSpec) -> list[int]:
        """How many of rope's frequencies rotate by time, height and width."""
        pairs = spec.ropes[0].width // 2
        first = ceil_div(pairs, 3)
        second = ceil_div(pairs - first, 2)
        return [first, second, pairs - first - second, 0]

    def gguf_keys(self, spec: ModelSpec, where: str) -> dict[str, Any]:
        return super().gguf_keys(spec, where) | {"rope.dimension_sections": self.sections(spec)}

    def gguf_vision_keys(self, config: FileConfig) -> dict[str, Any]:
        return sections_of(config)


@dataclass(frozen=True)
class Qwen35Moe(Mixture, Qwen35):
    """The routing weights of a token always sum to one: the configuration has no setting for it."""

    def completed(self, config: FileConfig) -> dict[str, Any]:
        return super().completed(config) | {"norm_topk_prob": True}


@dataclass(frozen=True)
class Qwen3Next(Qwen3Moe, QwenDelta):
    """Qwen 3's mixture of experts, with delta nets as mixers in most layers."""


def _spaced(layers: int, every: int) -> list[str]:
    return [FULL if (index + 1) % every == 0 else LINEAR for index in range(layers)]


DELTA_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
DELTA_KEYS = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
DELTA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
DELTA_NAMES_35 = DELTA_NAMES | {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
}
DELTA_COMMON: dict[str, Any] = {
    "norm_offset": 1.0,
    "qk_norm": True,
    "attention_fields": {"gate": "in_q"},
    "partial_rope": True,
}
DELTA_MIXTURE: dict[str, Any] = {
    "experts_key": "num_experts",
    "expert_ffn_key": "moe_intermediate_size",
    "shared": "mlp.shared_expert",
    "shared_ffn_key": "shared_expert_intermediate_size",
    "shared_gate": True,
    "folder_names": {".mlp.shared_expert.gate.": ".mlp.shared_expert_gate."},
    "keys": DELTA_KEYS
    | {
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    },
    **DELTA_COMMON,
}
SHARED_NAMES = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert.gate": "ffn_gate_inp_shexp",
}
EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}


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
    Qwen35(
        "qwen3_5",
        "Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        outer=("qwen3_5",),
        architecture="qwen35",
        defaults=DELTA_DEFAULTS,
        keys=DELTA_KEYS,
        gguf_names=DELTA_NAMES_35,
        tiled_in_gguf=True,
        **DELTA_COMMON,
    ),
    Qwen35Moe(
        "qwen3_5_moe",
        "Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        outer=("qwen3_5_moe",),
        architecture="qwen35moe",
        defaults=DELTA_DEFAULTS | EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8},
        gguf_names=DELTA_NAMES_35 | SHARED_NAMES,
        tiled_in_gguf=True,
        **DELTA_MIXTURE,
    ),
    Qwen3Next(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        architecture="qwen3next",
        defaults=DELTA_DEFAULTS | EXPERTS | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
        gguf_names=DELTA_NAMES
        | SHARED_NAMES
        | {"linear_attn.in_proj_qkvz": "attn_qkv", "linear_attn.in_proj_ba": "ssm_ba"},
        gguf_parts={"attn_qkv": "attn_gate"},
        by_key_head=True,
        dense_by_parameter=True,
        **DELTA_MIXTURE,
    ),
)
