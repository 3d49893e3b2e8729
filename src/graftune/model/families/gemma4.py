"""Gemma 4: layers with a window and layers without one have heads of different widths, values have a norm, scores are
not scaled, and a stored scalar multiplies the whole stream after each layer.

Layers without a window may have no v_proj: their values are the keys before their norm. A configuration states what
these layers have of their own as `global_head_dim` and `num_global_key_value_heads`, or, as newer files do, for each
layer in `per_layer_config`. Their rope rotates by a share of the frequencies only, which a GGUF states as divisors.

The small models (E2B, E4B) also have an input of each layer's own, computed from the tokens (layer_inputs.py), and
their last layers use the keys and values of the last layer of the same kind before them. In the mixture (26B-A4B)
experts stand beside the MLP; they and their router read the stream through norms of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.model import layer_inputs
from graftune.model.families import rope
from graftune.model.families.common import Family
from graftune.model.families.gemma import AROUND
from graftune.model.families.reading import FileConfig, Getter
from graftune.model.feed_forward.experts import ExpertsSpec
from graftune.model.feed_forward.gated import GatedSpec
from graftune.model.feed_forward.per_layer import PerLayerSpec
from graftune.model.feed_forward.router import RouterSpec
from graftune.model.layer_inputs import LayerInputSpec
from graftune.model.layer_spec import BranchPart, BranchSpec, LayerSpec
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.part import MixerSpec
from graftune.model.rotary import inverse_frequencies
from graftune.model.spec import EmbeddingSpec, ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
NOT_ROTATED = 1e30  # a divisor that makes a frequency zero
LAYER_TABLE = "per_layer_token_embd.weight"
TOP = {
    layer_inputs.TABLE: LAYER_TABLE.removesuffix(".weight"),
    layer_inputs.PROJECTION: "per_layer_model_proj",
    layer_inputs.NORM: "per_layer_proj_norm",
}
OWN = ("head_dim", "num_key_value_heads")  # the keys that `per_layer_config` may override


class Gemma4(Family):
    # Reading

    def spec(self, config: FileConfig, where: str, spelled: Mapping[str, str] | None = None) -> ModelSpec:
        if config.get("use_bidirectional_attention") == "vision":  # only image tokens attend to later ones
            config = dict(config) | {"use_bidirectional_attention": None}
        get = Getter(self.completed(config), where, spelled or {})
        plain = super().spec(config, where, spelled)
        layers = tuple(self.layer(get, layer) for layer in plain.layers)
        return replace(plain, layers=layers, layer_inputs=self.layer_inputs(get))

    def layer(self, get: Getter, plain: LayerSpec) -> LayerSpec:
        """A plain layer of two branches plus Gemma 4's own: wider MLP, experts, per-layer input and stream scale."""
        mixing, feeding = plain.branches
        (mixer,), (each,) = mixing.parts, feeding.parts
        assert isinstance(mixer.part, AttentionSpec) and isinstance(each.part, GatedSpec)
        if mixer.part.keys_from is not None and get.config.get("use_double_wide_mlp"):
            wide = replace(each, part=replace(each.part, ffn=2 * each.part.ffn))
            feeding = replace(feeding, parts=(wide,))
        if get.config.get("enable_moe_block"):
            feeding = self.with_experts(get, feeding)
        branches, inner = [mixing, feeding], int(get.number("hidden_size_per_layer_input", 0))
        if inner:
            assert each.out_norm is not None
            part = PerLayerSpec(each.part.width, inner, each.part.activation)
            norm = replace(each.out_norm, name="post_per_layer_input_norm")
            branches.append(BranchSpec((BranchPart(part, None, norm),)))
        return LayerSpec(tuple(branches), stream_scale="layer_scalar")

    def with_experts(self, get: Getter, feeding: BranchSpec) -> BranchSpec:
        """The MLP's branch with experts in parallel: each of the two outputs has a norm, and so has their sum."""
        (each,) = feeding.parts
        (count, chosen), norm = get.experts("num_experts", "top_k_experts"), each.out_norm
        assert isinstance(each.part, GatedSpec) and norm is not None
        router = RouterSpec(name="router.proj", input_scale="router.scale", expert_scale="router.per_expert_scale")
        experts = ExpertsSpec(
            each.part.width, get.whole("moe_intermediate_size"), count, chosen, router, "", each.part.activation,
            stacked=True, own_norm="pre_feedforward_layernorm_2", norm_eps=norm.eps,
        )  # fmt: skip
        first, second = (replace(norm, name=f"{norm.name}_{number}") for number in (1, 2))
        return BranchSpec((replace(each, out_norm=first), BranchPart(experts, None, second)), norm, feeding.scale)

    @property
    def experts_module(self) -> str:
        return ""

    def layer_inputs(self, get: Getter) -> LayerInputSpec | None:
        inner, width = int(get.number("hidden_size_per_layer_input", 0)), get.whole("hidden_size")
        if not inner:
            return None
        vocab = int(get.number("vocab_size_per_layer_input", get.whole("vocab_size")))
        return LayerInputSpec(vocab, get.layers(), inner, width, get.number("rms_norm_eps", 1e-6))

    def embedding(self, get: Getter) -> EmbeddingSpec:
        return replace(super().embedding(get), scale=math.sqrt(get.whole("hidden_size")))

    def windowed(self, get: Getter) -> list[bool]:
        """Which layers have a window; the last layer never has one."""
        found = get.config.get("layer_types") or [
            FULL if (index + 1) % 6 == 0 else SLIDING for index in range(get.layers())
        ]
        return [kind == SLIDING for kind in get.by_layer(found, (FULL, SLIDING))[:-1]] + [False]

    def mixers(self, get: Getter) -> list[MixerSpec]:
        windowed, window = self.windowed(get), int(get.number("sliding_window", 0))
        own = _own_values(get, [not has_window for has_window in windowed])
        first_shared = get.layers() - int(get.number("num_kv_shared_layers", 0))
        # The last layer of each kind that has keys of its own.
        owners = {windowed[index]: index for index in range(max(0, first_shared))}
        if first_shared < get.layers() and set(owners) != set(windowed):
            raise get.refused("shared keys")
        used = set(windowed[first_shared:])
        found: list[MixerSpec] = []
        for index, has_window in enumerate(windowed):
            mixer = self.attention(Getter({**get.config, **own[index]}, get.where, get.spelled))
            full, local = self.ropes(get, mixer.head_width)
            mixer = replace(
                mixer,
                window=window if has_window else 0,
                rope=local if has_window else full,
                v_from_k=not has_window and bool(get.config.get("attention_k_eq_v")),
                shares_keys=has_window in used and owners[has_window] == index,
                keys_from=owners[has_window] if index >= first_shared else None,
            )
            found.append(mixer)
        return found

    # GGUF

    def gguf_config(self, metadata: FileConfig, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        """A GGUF's usual keys describe the heads of layers without a window, keys in _swa those of the others."""
        config = super().gguf_config(metadata, tensors, where)
        layers, kinds = config["num_hidden_layers"], config.get("layer_types") or ()
        shared, heads = int(config.get("num_kv_shared_layers") or 0), config.get("num_key_value_heads")
        full = [index for index, kind in enumerate(kinds) if kind == FULL and index < layers - shared]
        width = config["head_dim"]
        per_layer: dict[int, dict[str, Any]] = {i: {"head_dim": width} for i, kind in enumerate(kinds) if kind == FULL}
        if isinstance(wide := config["intermediate_size"], list):
            config |= {"intermediate_size": wide[0], "use_double_wide_mlp": wide[-1] == 2 * wide[0]}
        if LAYER_TABLE in tensors:
            config["vocab_size_per_layer_input"] = int(tensors[LAYER_TABLE].shape[0])
        if isinstance(heads, list):
            for index, count in enumerate(heads):
                per_layer.setdefault(index, {})["num_key_value_heads"] = count
            heads = heads[0]
        scaling = config.pop("rope_scaling")
        theta = {"rope_theta": config["rope_theta"]}
        own = {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq") or config["rope_theta"]}
        return config | {
            "head_dim": metadata.get(f"{self.arch}.attention.key_length_swa") or width,
            "num_key_value_heads": heads,
            "per_layer_config": per_layer,
            "attention_k_eq_v": bool(full) and all(f"blk.{i}.attn_v.weight" not in tensors for i in full),
            "rope_parameters": {FULL: theta | _proportional(scaling, where), SLIDING: own},
            "hidden_size_per_layer_input": config.get("hidden_size_per_layer_input") or 0,
            "enable_moe_block": bool(config.get("num_experts")),
            "final_logit_softcapping": config.get("final_logit_softcapping", 30.0),  # llama.cpp's where a file has none
        }

    def gguf_keys(self, spec: ModelSpec, where: str) -> dict[str, Any]:
        local, full = _kinds(spec)
        mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
        found = super().gguf_keys(_with_uniform_heads(spec), where)
        stated = self.config(spec, where)
        keys = {ours: theirs for ours, theirs in EXPERT_KEYS.items() if ours in stated}
        return (
            found
            | {theirs: stated[ours] for ours, theirs in keys.items()}
            | {
                "attention.key_length": full.head_width,
                "attention.value_length": full.head_width,
                "attention.key_length_swa": local.head_width,
                "attention.value_length_swa": local.head_width,
                "attention.head_count_kv": [mixer.kv_heads for mixer in mixers],
                "attention.sliding_window_pattern": [mixer.window > 0 for mixer in mixers],
                "attention.shared_kv_layers": sum(mixer.keys_from is not None for mixer in mixers),
                "embedding_length_per_layer_input": _inner(spec),
                "feed_forward_length": [layer.feed_forward.products["down"][1] for layer in spec.layers],
                "final_logit_softcapping": spec.head.logit_cap,
                "rope.dimension_count": full.rope.width,
                "rope.dimension_count_swa": local.rope.width,
            }
        )

    def gguf_tensors(self, spec: ModelSpec) -> dict[str, torch.Tensor]:
        """llama.cpp requires the frequency divisors in the file of every model."""
        full = _kinds(spec)[1].rope
        rotated = inverse_frequencies(full.width, full.theta, full.scaling)[0] > 0
        return {rope.DIVISORS: torch.where(rotated, float(full.scaling.factor), NOT_ROTATED)}

    # Writing

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        local, full = _kinds(spec)
        mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
        found = super().config(_with_uniform_heads(spec), where)
        for key in ("rope_scaling", "partial_rotary_factor"):  # rope_parameters states it
            found.pop(key, None)
        if any((m.head_width, m.kv_heads) != _sizes(full if not m.window else local) for m in mixers):
            raise GraftuneError("its layers differ in more than their windows", where=where, fix="export to peft")
        experts = next((part for part in spec.layers[0].parts if isinstance(part, ExpertsSpec)), None)
        if experts is not None:
            sizes = {"num_experts": experts.experts, "top_k_experts": experts.chosen}
            found |= sizes | {"moe_intermediate_size": experts.ffn, "enable_moe_block": True}
        if spec.layer_inputs is not None:
            found["vocab_size_per_layer_input"] = spec.layer_inputs.vocab
        return found | {
            "hidden_activation": found.pop("hidden_act"),
            "global_head_dim": full.head_width,
            "num_global_key_value_heads": full.kv_heads,
            "attention_k_eq_v": full.v_from_k,
            "num_kv_shared_layers": sum(mixer.keys_from is not None for mixer in mixers),
            "use_double_wide_mlp": len({layer.feed_forward for layer in spec.layers}) > 1,
            "hidden_size_per_layer_input": _inner(spec),
        }

    # Names

    def is_unused(self, name: str, spec: ModelSpec) -> bool:
        """Checkpoints hold k and v projections even for layers that use another layer's keys and values."""
        found = re.fullmatch(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight", name)
        if found is None or int(found[1]) >= len(spec.layers):
            return False
        mixer = spec.layers[int(found[1])].mixer
        return isinstance(mixer, AttentionSpec) and mixer.keys_from is not None

    @property
    def top_names(self) -> dict[str, str]:
        return super().top_names | TOP


def _own_values(get: Getter, full: list[bool]) -> list[dict[str, Any]]:
    """Each layer's overrides of the model's head_dim and num_key_value_heads."""
    listed = get.config.get("per_layer_config")
    if listed is not None:
        by_number = {int(index): values for index, values in dict(listed).items()}
        if any(set(values) - set(OWN) for values in by_number.values()):
            raise get.refused("per_layer_config")
        return [dict(by_number.get(index) or {}) for index in range(len(full))]
    own: dict[str, Any] = {"head_dim": int(get.number("global_head_dim", 512))}
    if get.config.get("attention_k_eq_v") and get.config.get("num_global_key_value_heads"):
        own["num_key_value_heads"] = get.whole("num_global_key_value_heads")
    return [own if is_full else {} for is_full in full]


def _proportional(scaling: FileConfig, where: str) -> dict[str, Any]:
    """The rope parameters of layers without a window, derived from the frequency divisors of a GGUF."""
    divisors = list(scaling.get("divisors") or ())
    count = sum(divisor < NOT_ROTATED / 2 for divisor in divisors)
    if not count or len(set(divisors[:count])) != 1 or any(d < NOT_ROTATED / 2 for d in divisors[count:]):
        raise GraftuneError(
            "its rope frequencies are not those of Gemma 4", where=where, fix="this variant is not supported"
        )
    share = count / len(divisors)
    return {"rope_type": "proportional", "partial_rotary_factor": share, "factor": divisors[0]}


def _inner(spec: ModelSpec) -> int:
    """The width of a layer's own input; 0: it has none."""
    return 0 if spec.layer_inputs is None else spec.layer_inputs.inner


def _kinds(spec: ModelSpec) -> tuple[AttentionSpec, AttentionSpec]:
    """The attention of the first layer with a window, if there is one, and of the first layer without."""
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    full = [mixer for mixer in mixers if not mixer.window]
    return next((mixer for mixer in mixers if mixer.window), full[0]), full[0]


def _sizes(mixer: AttentionSpec) -> tuple[int, int]:
    return mixer.head_width, mixer.kv_heads


def _with_uniform_heads(spec: ModelSpec) -> ModelSpec:
    """The same model with heads of one size and one MLP, for the keys that a file states once."""
    local, _ = _kinds(spec)
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.mixer, AttentionSpec)
        mixing, feeding, *_ = layer.branches
        mixer = replace(local, window=layer.mixer.window, rope=layer.mixer.rope, shares_keys=False)
        mlp = replace(feeding.parts[0], part=spec.layers[0].feed_forward)
        mixing = replace(mixing, parts=(replace(mixing.parts[0], part=mixer),))
        layers.append(LayerSpec((mixing, replace(feeding, parts=(mlp,)))))
    return replace(spec, layers=tuple(layers))


EXPERT_KEYS = {
    "num_experts": "expert_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
COMMON: dict[str, Any] = {
    "architecture": "gemma4",
    "norms": AROUND,
    "qk_norm": True,
    "attention_fields": {"score_scale": 1.0, "v_norm": True, "unweighted": ("v_norm",)},
    "windows": "alternate",
    "windows_in_llama_cpp": True,
    "local_rope": True,
    "keys": {
        "final_logit_softcapping": "final_logit_softcapping",
        "num_kv_shared_layers": "attention.shared_kv_layers",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        **EXPERT_KEYS,
    },
    "experts_by_key": False,
    "gguf_names": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "layer_scalar": "layer_output_scale.weight",
        "router.proj": "ffn_gate_inp",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
    },
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "rope_parameters": ROPES,
    "sliding_window": 512,
}
GEMMA4 = (
    Gemma4(
        "gemma4",
        "Gemma4ForCausalLM",
        model_type="gemma4_text",
        outer=("gemma4",),
        defaults=DEFAULTS | {"hidden_size_per_layer_input": 256},
        **COMMON,
    ),
    Gemma4(
        "gemma4_unified",
        "Gemma4UnifiedForCausalLM",
        model_type="gemma4_unified_text",
        outer=("gemma4_unified",),
        defaults=DEFAULTS | {"max_position_embeddings": 262_144, "sliding_window": 1024},
        **COMMON,
    ),
)
