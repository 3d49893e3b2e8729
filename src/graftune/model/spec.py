"""What a decoder looks like, read from config.json or from GGUF metadata. Families differ by these values alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.model.families import ARCHITECTURES, FAMILIES, MODEL_TYPES, Family
from graftune.model.rotary import Rope, RopeScaling, inverse_frequencies

__all__ = [
    "FAMILIES",
    "MODEL_TYPES",
    "NORMS",
    "ModelSpec",
    "RopeScaling",
    "from_config",
    "from_gguf",
    "inverse_frequencies",
]

# The norms of a block by their place: before and behind the attention half, before and behind the MLP half.
NORMS = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "behind": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
# llama.cpp knows these models by their depth: they divide scores by the root of width / heads, all others of a head's.
_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


@dataclass(frozen=True)
class ModelSpec:
    family: str
    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_width: int
    vocab: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False  # over all heads of q, and of k, together
    norms: str = "before"  # of NORMS
    norm_shift: float = 0.0  # what Hugging Face's checkpoints leave off the norm weights
    activation: str = "silu"  # silu | gelu
    fused: bool = False  # checkpoints hold qkv and gate_up as one projection each
    window: int = 0  # sliding attention window; 0: none
    window_layers: tuple[int, ...] = ()  # layers it applies to
    rope: RopeScaling = field(default_factory=RopeScaling)
    local_theta: float = 0.0  # rope base of the layers with a window, not stretched; 0: as the others
    unrotated_layers: tuple[int, ...] = ()
    rotated: int = 0  # columns of a head that rope turns; 0: all
    embedding_scale: float = 1.0
    attention_scale: float = 0.0  # of the scores; 0: 1 / sqrt(head width)
    attention_cap: float = 0.0  # scores are bent towards it by a tanh; 0: they are not
    residual_scale: float = 1.0  # of what a half adds to the stream
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    experts: int = 0  # of each layer's MLP; 0: it is dense. ffn is then one expert's
    experts_chosen: int = 0  # for each token
    experts_normalised: bool = True  # whether the weights of the chosen sum to one

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the projections of a block; of a mixture, gate, up and down are those of one expert."""
        q, kv = self.heads * self.head_width, self.kv_heads * self.head_width
        if self.fused:
            return {
                "qkv_proj": (q + 2 * kv, self.width),
                "o_proj": (self.width, q),
                "gate_up_proj": (2 * self.ffn, self.width),
                "down_proj": (self.width, self.ffn),
            }
        return {
            "q_proj": (q, self.width),
            "k_proj": (kv, self.width),
            "v_proj": (kv, self.width),
            "o_proj": (self.width, q),
            "gate_proj": (self.ffn, self.width),
            "up_proj": (self.ffn, self.width),
            "down_proj": (self.width, self.ffn),
        }

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The projections that share an input, and are one product here; a mixture's experts are apart."""
        if self.experts:
            return {"qkv": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",)}
        if self.fused:
            return {"qkv": ("qkv_proj",), "o": ("o_proj",), "gate_up": ("gate_up_proj",), "down": ("down_proj",)}
        return {
            "qkv": ("q_proj", "k_proj", "v_proj"),
            "o": ("o_proj",),
            "gate_up": ("gate_proj", "up_proj"),
            "down": ("down_proj",),
        }

    @property
    def parameters(self) -> int:
        mlp = ("gate_proj", "up_proj", "down_proj") if self.experts else ()
        times = {p: self.experts if p in mlp else 1 for p in self.projections}
        block = sum(times[p] * out * into for p, (out, into) in self.projections.items()) + self.experts * self.width
        return self.layers * block + self.vocab * self.width * (1 if self.tied else 2)

    @property
    def qk_norm_widths(self) -> tuple[int, int]:
        if self.wide_qk_norm:
            return self.heads * self.head_width, self.kv_heads * self.head_width
        return self.head_width, self.head_width

    @property
    def score_scale(self) -> float:
        return self.attention_scale or self.head_width**-0.5

    def describe(self) -> dict[str, Any]:
        return asdict(self) | {"parameters": self.parameters}

    def inverse_frequencies(self) -> tuple[torch.Tensor, float]:
        """Of the layers without a window, for short texts."""
        return inverse_frequencies(self.rotated or self.head_width, self.rope_theta, self.rope)

    def ropes(self, factors: torch.Tensor | None = None) -> tuple[Rope, ...]:
        """A rope for each kind of layer (`rope_of`). `factors`: divisors that a GGUF carries."""
        frequencies, scaling = self.inverse_frequencies()
        far, limit = None, 0
        if self.rope.kind == "longrope":
            plain = inverse_frequencies(self.rotated or self.head_width, self.rope_theta, RopeScaling())[0]
            far, limit = plain / torch.tensor(self.rope.long), self.rope.original_length
        found = [Rope(frequencies if factors is None else frequencies / factors, scaling, far, limit)]
        if self.local_theta:
            local = inverse_frequencies(self.rotated or self.head_width, self.local_theta, RopeScaling())
            found.append(Rope(*local))
        if self.unrotated_layers:  # an angle of zero turns nothing
            found.append(Rope(torch.zeros_like(frequencies), 1.0))
        return tuple(found)

    def rope_of(self, layer: int) -> int:
        if layer in self.unrotated_layers:
            return 2 if self.local_theta else 1
        return 1 if self.local_theta and layer in self.window_layers else 0


def from_config(config: Mapping[str, Any], where: str) -> ModelSpec:
    """Hugging Face's config.json."""
    told = str(config.get("model_type", ""))
    name = MODEL_TYPES.get(told, told)
    if name not in FAMILIES or (name == "gemma3" and told == name):
        raise _unknown_family(told, where)
    family = FAMILIES[name]
    get = _Getter(config, where)
    width, heads = get.whole("hidden_size"), get.whole("num_attention_heads")
    layers = get.whole("num_hidden_layers")
    for key in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        if config.get(key):
            raise GraftuneError(f"{key} is set, which is not supported", where=where, mend="use a base without it")
    activation = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise GraftuneError(
            f"activation {activation!r} is not known", where=where, mend=f"known are {', '.join(ACTIVATIONS)}"
        )
    _check_quantisation(config.get("quantization_config") or {}, where)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise GraftuneError(
            f"{heads} heads do not divide by {kv_heads} key heads", where=where, mend="check config.json"
        )
    config = UNSAID.get(name, {}) | dict(config)
    head_width = int(config.get("head_dim") or width // heads)
    unrotated = _unrotated(config, name, layers)
    window, window_layers = _window(config, family, layers, unrotated)
    theta, scaling, local_theta = _rope(config, family, where)
    before_softmax = config.get("query_pre_attn_scalar")
    return ModelSpec(
        family=name,
        layers=layers,
        width=width,
        ffn=get.whole("moe_intermediate_size" if name == "qwen3_moe" else "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        vocab=get.whole("vocab_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        max_positions=int(config.get("max_position_embeddings", 2048)),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        **_by_name(family),
        activation=ACTIVATIONS[activation],
        window=window,
        window_layers=window_layers,
        rope=scaling,
        local_theta=local_theta,
        unrotated_layers=unrotated,
        rotated=_rotated(config, family, head_width, where),
        embedding_scale=math.sqrt(width) if family.scaled_embedding else _number(config, "embedding_multiplier", 1.0),
        attention_scale=float(before_softmax) ** -0.5
        if before_softmax
        else _number(config, "attention_multiplier", 1.0 if name == "granite" else 0.0),
        attention_cap=_number(config, "attn_logit_softcapping", 0.0),
        residual_scale=_number(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / _number(config, "logits_scaling", 1.0),
        logit_cap=_number(config, "final_logit_softcapping", 0.0),
        **(_mixture(config, name, get, where) if family.mixture else {}),
    )


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


def _mixture(config: Mapping[str, Any], family: str, get: _Getter, where: str) -> dict[str, Any]:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise GraftuneError("has experts in some layers only", where=where, mend="this variant is not supported")
    count = get.whole("num_experts" if "num_experts" in config else "num_local_experts")
    normalised = family == "mixtral" or bool(config.get("norm_topk_prob"))
    return _experts(count, get.whole("num_experts_per_tok"), where) | {"experts_normalised": normalised}


def _experts(count: int, chosen: int, where: str) -> dict[str, Any]:
    if not chosen <= count <= 1 << 16:
        raise GraftuneError(f"chooses {chosen} of {count} experts", where=where, mend="download the model again")
    return {"experts": count, "experts_chosen": chosen}


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str) -> ModelSpec:
    """GGUF metadata. `tensors` (name -> anything with a shape) decides what the metadata leaves open."""
    arch = str(metadata.get("general.architecture", ""))
    if ARCHITECTURES.get(arch, arch) not in FAMILIES:
        raise _unknown_family(arch, where)
    experts = bool(metadata.get(f"{arch}.expert_count"))
    if "token_embd.weight" not in tensors:
        raise GraftuneError("holds no model weights (no token_embd.weight)", where=where, mend="give a full model file")
    get = _Getter(metadata, where, f"{arch}.")
    width, heads, layers = get.whole("embedding_length"), get.whole("attention.head_count"), get.whole("block_count")
    window = int(metadata.get(f"{arch}.attention.sliding_window", 0))
    name = "olmo3" if arch == "olmo2" and window else ARCHITECTURES.get(arch, arch)
    name = "mixtral" if name == "llama" and experts else name
    family = FAMILIES[name]
    if experts != family.mixture:
        what = "is a mixture of experts" if experts else "has no experts"
        raise GraftuneError(f"{what}, other than models of {arch}", where=where, mend="this variant is not supported")
    theta = float(metadata.get(f"{arch}.rope.freq_base", 10000.0))
    head_width = int(metadata.get(f"{arch}.attention.key_length", width // heads))
    turned = int(metadata.get(f"{arch}.rope.dimension_count", head_width))
    if not family.part_of_head:
        _whole_heads(turned / head_width, where)
    if metadata.get(f"{arch}.rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise GraftuneError("yarn_ext_factor is not known", where=where, mend="use a file without it")
    scale = _number(metadata, f"{arch}.attention.scale", 0.0)
    if _BY_WIDTH.get(arch) == layers:
        scale = (width / heads) ** -0.5
    windows = _gguf_windows(metadata.get(f"{arch}.attention.sliding_window_pattern"), family, layers) if window else ()
    local_theta = _number(
        metadata, f"{arch}.rope.freq_base_swa", theta if family.local_theta < 0 else family.local_theta
    )
    return ModelSpec(
        family=name,
        layers=layers,
        width=width,
        ffn=get.whole("expert_feed_forward_length" if name == "qwen3_moe" else "feed_forward_length"),
        heads=heads,
        kv_heads=int(metadata.get(f"{arch}.attention.head_count_kv", heads)),
        head_width=head_width,
        vocab=int(tensors["token_embd.weight"].shape[0]),
        norm_eps=float(metadata.get(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)),
        rope_theta=theta,
        max_positions=int(metadata.get(f"{arch}.context_length", 2048)),
        tied="output.weight" not in tensors,
        **_by_name(family),
        activation=family.activation,
        window=window if windows else 0,
        window_layers=windows,
        rope=_gguf_rope(metadata, tensors, arch, where),
        local_theta=local_theta if family.local_theta else 0.0,
        unrotated_layers=_unrotated({}, name, layers),
        rotated=0 if turned == head_width else turned,
        embedding_scale=math.sqrt(width)
        if family.scaled_embedding
        else _number(metadata, f"{arch}.embedding_scale", 1.0),
        attention_scale=scale,
        attention_cap=_number(metadata, f"{arch}.attn_logit_softcapping", 0.0),
        residual_scale=_number(metadata, f"{arch}.residual_scale", 1.0),
        logit_scale=1.0 / _number(metadata, f"{arch}.logit_scale", 1.0),
        logit_cap=_number(metadata, f"{arch}.final_logit_softcapping", 0.0),
        **(_experts(get.whole("expert_count"), get.whole("expert_used_count"), where) if experts else {}),
    )


def _unknown_family(told: str, where: str) -> GraftuneError:
    if told == "gemma3":
        return GraftuneError(
            "is a model of text and images",
            where=where,
            mend="give the text model (gemma3_text) or its GGUF, which holds the text part alone",
        )
    return GraftuneError(
        f"architecture {told or 'none'!r} is not known", where=where, mend=f"known are {', '.join(FAMILIES)}"
    )


def _by_name(family: Family) -> dict[str, Any]:
    keys = ("qkv_bias", "qk_norm", "wide_qk_norm", "norms", "norm_shift", "fused")
    return {key: getattr(family, key) for key in keys}


def _number(values: Mapping[str, Any], key: str, default: float) -> float:
    """A value that may be missing or null."""
    value = values.get(key)
    return default if value is None else float(value)


def _whole_heads(share: float, where: str) -> None:
    if share != 1:
        raise GraftuneError("rotates only a part of each head", where=where, mend="this variant is not supported")


class _Getter:
    """Whole numbers that must be there and be positive."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = ""):
        self.values, self.where, self.prefix = values, where, prefix

    def whole(self, key: str) -> int:
        value = self.values.get(self.prefix + key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise GraftuneError(
                f"{self.prefix + key} is {value!r}", where=self.where, mend="it must be there, a whole number above 0"
            )
        return value


def _each(layers: int) -> range:
    """All layers, or as many as a sane file has: a damaged one may claim any number."""
    return range(min(layers, 1 << 16))


def _unrotated(config: Mapping[str, Any], family: str, layers: int) -> tuple[int, ...]:
    """SmolLM3 leaves rope out of every fourth layer; `no_rope_layers` has a 0 there."""
    if family != "smollm3":
        return ()
    step = int(config.get("no_rope_layer_interval") or 4)
    turned = config.get("no_rope_layers") or [(i + 1) % step for i in _each(layers)]
    return tuple(i for i, turns in enumerate(turned) if not turns)


def _window(
    config: Mapping[str, Any], family: Family, layers: int, unrotated: tuple[int, ...]
) -> tuple[int, tuple[int, ...]]:
    window = int(config.get("sliding_window") or 0)
    if not window or family.windows == "none" or (family.windows == "told" and not config.get("use_sliding_window")):
        return 0, ()
    if kinds := config.get("layer_types"):
        return window, tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if family.windows == "alternate":
        step = int(config.get("sliding_window_pattern") or family.pattern)
        return window, tuple(i for i in _each(layers) if (i + 1) % step)
    if unrotated:
        return window, unrotated
    first = int(config.get("max_window_layers", 0)) if family.windows == "told" else 0
    return window, tuple(_each(layers)[first:])


def _gguf_windows(pattern: Any, family: Family, layers: int) -> tuple[int, ...]:
    """Which layers have one: a list of them in newer files, or a number: every such layer has none."""
    if isinstance(pattern, list):
        return tuple(i for i, windowed in enumerate(pattern) if windowed)
    if family.windows != "alternate":
        return tuple(_each(layers)) if family.windows == "all" else ()
    step = int(pattern or family.pattern)
    return tuple(i for i in _each(layers) if (i + 1) % step)


def _rotated(config: Mapping[str, Any], family: Family, head_width: int, where: str) -> int:
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = float(values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if not family.part_of_head:
        _whole_heads(share, where)
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
            raise GraftuneError("stretches the rope of windows", where=where, mend="this variant is not supported")
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
        raise GraftuneError(f"rope scaling {kind!r} is not known", where=where, mend=f"known are {', '.join(known)}")
    if kind == "longrope" and not (values.get("short_factor") and values.get("long_factor")):
        raise GraftuneError(
            "rope scaling 'longrope' has no short_factor or no long_factor",
            where=where,
            mend="download the model again",
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


WIDEST_HEAD = 1 << 14


def _gguf_rope(metadata: Mapping[str, Any], tensors: Mapping[str, Any], arch: str, where: str) -> RopeScaling:
    kind = str(metadata.get(f"{arch}.rope.scaling.type", "none"))
    original = int(metadata.get(f"{arch}.rope.scaling.original_context_length", 0)) or int(
        metadata.get(f"{arch}.context_length", 2048)
    )
    attention = metadata.get(
        f"{arch}.rope.scaling.yarn_attn_factor", metadata.get(f"{arch}.rope.scaling.attn_factor", 1.0)
    )
    lists = [f"rope_factors_{which}.weight" for which in ("short", "long")]
    if all(name in tensors for name in lists):
        for name in lists:
            if math.prod(tensors[name].shape) > WIDEST_HEAD // 2:
                raise GraftuneError(f"tensor {name} is longer than any head", where=where, mend="download it again")
        short, long = (tuple(tensors[name].values().tolist()) for name in lists)
        return RopeScaling(
            "longrope", original_length=original, attention_factor=float(attention), short=short, long=long
        )
    # Llama 3's frequencies are a tensor of the file (rope_freqs.weight): weights/base.py hands them over.
    if kind == "none":
        return RopeScaling()
    if kind not in ("linear", "yarn"):
        raise GraftuneError(f"rope scaling {kind!r} is not known", where=where, mend="known are linear and yarn")
    return RopeScaling(
        kind=kind,
        factor=float(metadata.get(f"{arch}.rope.scaling.factor", 1.0)),
        original_length=original,
        beta_fast=float(metadata.get(f"{arch}.rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(metadata.get(f"{arch}.rope.scaling.yarn_beta_slow", 1.0)),
        attention_multiplier=float(attention),
    )


def _check_quantisation(told: Any, where: str) -> None:
    """Of prequantised checkpoints, bitsandbytes' NF4 and FP8 are read; all others are refused by name."""
    if not told:
        return
    method = told.get("quant_method") if isinstance(told, dict) else None
    kind = method or "its method is not named"
    if method == "bitsandbytes":
        kind = "llm_int8" if told.get("load_in_8bit") else told.get("bnb_4bit_quant_type", "fp4")
        if kind == "nf4":
            return
    if method == "fp8" or (method == "compressed-tensors" and _is_fp8(told.get("config_groups"))):
        return
    raise GraftuneError(
        f"is a quantised checkpoint ({kind}), of which only bitsandbytes' NF4 and FP8 are read",
        where=where,
        mend="give an NF4, FP8 or the unquantised model, or a GGUF file",
    )


def _is_fp8(groups: Any) -> bool:
    """Whether compressed-tensors holds all its weights as floats of eight bits."""
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else [{}]
    return all(w.get("type") == "float" and w.get("num_bits") == 8 for w in weights)
