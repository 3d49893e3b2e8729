"""The specification in Hugging Face's config.json, in the spellings of old and new checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from graftune.errors import GraftuneError
from graftune.model.families import FAMILIES, MODEL_TYPES, Family
from graftune.model.reading import (
    Getter,
    by_name,
    check_whole_heads,
    each,
    experts_of,
    number,
    unknown_family,
    unrotated_layers,
)
from graftune.model.rotary import RopeScaling
from graftune.model.spec import ModelSpec

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
# What transformers takes where a configuration leaves it out altogether (null says: none).
UNSAID: dict[str, dict[str, Any]] = {
    "gemma2": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "gemma3": {"query_pre_attn_scalar": 256, "sliding_window": 4096},
}


def from_config(config: Mapping[str, Any], where: str) -> ModelSpec:
    """Hugging Face's config.json."""
    model_type = str(config.get("model_type", ""))
    name = MODEL_TYPES.get(model_type, model_type)
    if name not in FAMILIES or (name == "gemma3" and model_type == name):
        raise unknown_family(model_type, where)
    family = FAMILIES[name]
    get = Getter(config, where)
    width, heads = get.whole("hidden_size"), get.whole("num_attention_heads")
    layers = get.whole("num_hidden_layers")
    for key in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        if config.get(key):
            raise GraftuneError(f"{key} is set, which is not supported", where=where, fix="use a base without it")
    activation = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise GraftuneError(
            f"activation {activation!r} is not known", where=where, fix=f"known are {', '.join(ACTIVATIONS)}"
        )
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise GraftuneError(
            f"{heads} heads do not divide by {kv_heads} key heads", where=where, fix="check config.json"
        )
    config = UNSAID.get(name, {}) | dict(config)
    if family.convolves:
        config = _lfm2(config)
    head_width = int(config.get("head_dim") or width // heads)
    unrotated = unrotated_layers(config, name, layers)
    window, window_layers = _window(config, family, layers, unrotated)
    theta, scaling, local_theta = _rope(config, family, where)
    before_softmax = config.get("query_pre_attn_scalar")
    return ModelSpec(
        family=name,
        layers=layers,
        width=width,
        ffn=Getter(config, where).whole("moe_intermediate_size" if name == "qwen3_moe" else "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        vocab=get.whole("vocab_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        max_positions=int(config.get("max_position_embeddings", 2048)),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        **by_name(family),
        activation=ACTIVATIONS[activation],
        window=window,
        window_layers=window_layers,
        rope=scaling,
        local_theta=local_theta,
        unrotated_layers=unrotated,
        rotated=_rotated(config, family, head_width, where),
        embedding_scale=math.sqrt(width) if family.scaled_embedding else number(config, "embedding_multiplier", 1.0),
        attention_scale=float(before_softmax) ** -0.5
        if before_softmax
        else number(config, "attention_multiplier", 1.0 if name == "granite" else 0.0),
        attention_cap=number(config, "attn_logit_softcapping", 0.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / number(config, "logits_scaling", 1.0),
        logit_cap=number(config, "final_logit_softcapping", 0.0),
        **(_mixture(config, name, get, where) if family.mixture else {}),
        **(_convolutions(config, layers, get, where) if family.convolves else {}),
    )


def _lfm2(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the names that others have for the same, and the feed-forward's width as it comes out."""
    ffn = int(config.get("block_ff_dim") or config.get("intermediate_size") or 0)
    if config.get("block_auto_adjust_ff_dim", True):
        ffn, multiple = int(2 * ffn / 3), int(config.get("block_multiple_of") or 256)
        if config.get("block_ffn_dim_multiplier", 1.0) is not None:
            ffn = math.ceil(int(config.get("block_ffn_dim_multiplier", 1.0) * ffn) / multiple) * multiple
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    named = {"intermediate_size": ffn, "rms_norm_eps": config.get("norm_eps", 1e-5), "tie_word_embeddings": tied}
    return dict(config) | named


def _convolutions(config: Mapping[str, Any], layers: int, get: Getter, where: str) -> dict[str, Any]:
    if config.get("conv_bias"):
        raise GraftuneError("conv_bias is set, which is not supported", where=where, fix="use a base without it")
    kinds = config.get("layer_types")
    if kinds:
        found = tuple(i for i, kind in enumerate(kinds) if kind == "conv")
    else:
        attends = config.get("full_attn_idxs")
        found = () if attends is None else tuple(i for i in each(layers) if i not in set(attends))
    return {"conv_layers": found, "conv_taps": get.whole("conv_L_cache") if "conv_L_cache" in config else 3}


def _mixture(config: Mapping[str, Any], family: str, get: Getter, where: str) -> dict[str, Any]:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise GraftuneError("has experts in some layers only", where=where, fix="this variant is not supported")
    count = get.whole("num_experts" if "num_experts" in config else "num_local_experts")
    normalised = family == "mixtral" or bool(config.get("norm_topk_prob"))
    return experts_of(count, get.whole("num_experts_per_tok"), where) | {"experts_normalised": normalised}


def _window(
    config: Mapping[str, Any], family: Family, layers: int, unrotated: tuple[int, ...]
) -> tuple[int, tuple[int, ...]]:
    window = int(config.get("sliding_window") or 0)
    if (
        not window
        or family.windows == "none"
        or (family.windows == "configured" and not config.get("use_sliding_window"))
    ):
        return 0, ()
    if kinds := config.get("layer_types"):
        return window, tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if family.windows == "alternate":
        step = int(config.get("sliding_window_pattern") or family.pattern)
        return window, tuple(i for i in each(layers) if (i + 1) % step)
    if unrotated:
        return window, unrotated
    first = int(config.get("max_window_layers", 0)) if family.windows == "configured" else 0
    return window, tuple(each(layers)[first:])


def _rotated(config: Mapping[str, Any], family: Family, head_width: int, where: str) -> int:
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = float(values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if not family.part_of_head:
        check_whole_heads(share, where)
    turned = int(head_width * share)
    return 0 if turned == head_width else turned


def _rope(config: Mapping[str, Any], family: Family, where: str) -> tuple[float, RopeScaling, float]:
    """theta, scaling and the base of layers with a window. `rope_parameters` is what newer checkpoints call
    `rope_scaling`, with theta inside, and where layers differ one a kind of layer."""
    values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    local: Mapping[str, Any] = {}
    if "full_attention" in values or "sliding_attention" in values:
        local = values.get("sliding_attention") or {}
        values = dict(values.get("full_attention") or {})
        if (local.get("rope_type") or "default") != "default":
            raise GraftuneError("stretches the rope of windows", where=where, fix="this variant is not supported")
    theta = float(values.get("rope_theta") or config.get("rope_theta") or family.theta)
    local_theta = 0.0
    if family.local_theta:
        usual = theta if family.local_theta < 0 else family.local_theta
        local_theta = float(local.get("rope_theta") or config.get("rope_local_base_freq") or usual)
    kind = str(values.get("rope_type") or values.get("type") or "default")
    if family.fused and kind in ("su", "yarn"):  # what Phi-3's first checkpoints call it
        kind = "longrope"
    if kind == "default":
        return theta, RopeScaling(), local_theta
    known = ("linear", "llama3", "yarn", "longrope")
    if kind not in known:
        raise GraftuneError(f"rope scaling {kind!r} is not known", where=where, fix=f"known are {', '.join(known)}")
    if kind == "longrope" and not (values.get("short_factor") and values.get("long_factor")):
        raise GraftuneError(
            "rope scaling 'longrope' has no short_factor or no long_factor",
            where=where,
            fix="download the model again",
        )
    longest = config.get("max_position_embeddings", 2048)
    original = values.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    usual = int(longest) / int(original or longest) if kind == "longrope" else 1.0
    return (
        theta,
        RopeScaling(
            kind=kind,
            factor=float(values.get("factor") or usual),
            original_length=int(original or longest),
            low_freq_factor=float(values.get("low_freq_factor", 1.0)),
            high_freq_factor=float(values.get("high_freq_factor", 4.0)),
            beta_fast=float(values.get("beta_fast") or 32.0),
            beta_slow=float(values.get("beta_slow") or 1.0),
            attention_factor=float(values.get("attention_factor") or 0.0),
            mscale=float(values.get("mscale") or 0.0),
            mscale_all_dim=float(values.get("mscale_all_dim") or 0.0),
            truncate=bool(values.get("truncate", True)),
            short=tuple(float(f) for f in values.get("short_factor") or ()),
            long=tuple(float(f) for f in values.get("long_factor") or ()),
        ),
        local_theta,
    )
