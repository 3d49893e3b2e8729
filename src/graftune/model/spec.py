"""What a decoder looks like, read from config.json or from GGUF metadata. Families differ by these values alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from graftune.errors import GraftuneError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched. Fields that a kind does not use stay at their defaults."""

    kind: str = "none"  # none | linear | llama3 | yarn
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0  # yarn's; 0: from the factor
    attention_multiplier: float = 1.0  # GGUF's: on top of what comes from the factor
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


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
    window: int = 0  # sliding attention window; 0: none
    window_layers: tuple[int, ...] = ()  # layers it applies to
    rope: RopeScaling = field(default_factory=RopeScaling)

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the seven projections of a block."""
        q, kv = self.heads * self.head_width, self.kv_heads * self.head_width
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
    def parameters(self) -> int:
        block = sum(out * into for out, into in self.projections.values())
        return self.layers * block + self.vocab * self.width * (1 if self.tied else 2)

    def describe(self) -> dict[str, Any]:
        return asdict(self) | {"parameters": self.parameters}

    def inverse_frequencies(self) -> tuple[torch.Tensor, float]:
        return inverse_frequencies(self.head_width, self.rope_theta, self.rope)


def from_config(config: Mapping[str, Any], where: str) -> ModelSpec:
    """Hugging Face's config.json."""
    family = str(config.get("model_type", ""))
    if family not in FAMILIES:
        shown = family or "none"
        raise GraftuneError(
            f"architecture {shown!r} is not known", where=where, mend=f"known are {', '.join(FAMILIES)}"
        )
    get = _Getter(config, where)
    width, heads = get.whole("hidden_size"), get.whole("num_attention_heads")
    layers = get.whole("num_hidden_layers")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise GraftuneError(f"{key} is set, which is not supported", where=where, mend="use a base without it")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise GraftuneError(f"activation {activation!r} is not known", where=where, mend="only silu is supported")
    if config.get("quantization_config"):
        raise GraftuneError("is a quantised checkpoint", where=where, mend="give the unquantised model or a GGUF file")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise GraftuneError(
            f"{heads} heads do not divide by {kv_heads} key heads", where=where, mend="check config.json"
        )
    window, window_layers = _window(config, family, layers)
    theta, scaling = _rope(config, where)
    return ModelSpec(
        family=family,
        layers=layers,
        width=width,
        ffn=get.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_width=int(config.get("head_dim") or width // heads),
        vocab=get.whole("vocab_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        max_positions=int(config.get("max_position_embeddings", 2048)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        window=window,
        window_layers=window_layers,
        rope=scaling,
    )


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str) -> ModelSpec:
    """GGUF metadata. `tensors` (name -> anything with a shape) decides what the metadata leaves open."""
    arch = str(metadata.get("general.architecture", ""))
    if arch not in FAMILIES:
        shown = arch or "none"
        raise GraftuneError(
            f"architecture {shown!r} is not known", where=where, mend=f"known are {', '.join(FAMILIES)}"
        )
    if metadata.get(f"{arch}.expert_count"):
        raise GraftuneError("is a mixture of experts", where=where, mend="only dense models are supported")
    if "token_embd.weight" not in tensors:
        raise GraftuneError("holds no model weights (no token_embd.weight)", where=where, mend="give a full model file")
    get = _Getter(metadata, where, f"{arch}.")
    width, heads = get.whole("embedding_length"), get.whole("attention.head_count")
    theta = float(metadata.get(f"{arch}.rope.freq_base", 10000.0))
    head_width = int(metadata.get(f"{arch}.attention.key_length", width // heads))
    _whole_heads(int(metadata.get(f"{arch}.rope.dimension_count", head_width)) / head_width, where)
    if metadata.get(f"{arch}.rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise GraftuneError("yarn_ext_factor is not known", where=where, mend="use a file without it")
    return ModelSpec(
        family=arch,
        layers=get.whole("block_count"),
        width=width,
        ffn=get.whole("feed_forward_length"),
        heads=heads,
        kv_heads=int(metadata.get(f"{arch}.attention.head_count_kv", heads)),
        head_width=head_width,
        vocab=int(tensors["token_embd.weight"].shape[0]),
        norm_eps=float(metadata.get(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)),
        rope_theta=theta,
        max_positions=int(metadata.get(f"{arch}.context_length", 2048)),
        tied="output.weight" not in tensors,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        rope=_gguf_rope(metadata, arch, where),
    )


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


def _window(config: Mapping[str, Any], family: str, layers: int) -> tuple[int, tuple[int, ...]]:
    window = int(config.get("sliding_window") or 0)
    if not window or (family.startswith("qwen") and not config.get("use_sliding_window")) or family == "llama":
        return 0, ()
    if kinds := config.get("layer_types"):
        return window, tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    first = int(config.get("max_window_layers", 0)) if family.startswith("qwen") else 0
    return window, tuple(range(first, layers))


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling]:
    """theta and scaling; `rope_parameters` is what newer checkpoints call `rope_scaling`, with theta inside."""
    values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    _whole_heads(float(values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0), where)
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = str(values.get("rope_type") or values.get("type") or "default")
    if kind == "default":
        return theta, RopeScaling()
    if kind not in ("linear", "llama3", "yarn"):
        raise GraftuneError(f"rope scaling {kind!r} is not known", where=where, mend="known are linear, llama3, yarn")
    original = values.get("original_max_position_embeddings") or config.get("max_position_embeddings", 2048)
    return theta, RopeScaling(
        kind=kind,
        factor=float(values.get("factor", 1.0)),
        original_length=int(original),
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        attention_factor=float(values.get("attention_factor") or 0.0),
        mscale=float(values.get("mscale") or 0.0),
        mscale_all_dim=float(values.get("mscale_all_dim") or 0.0),
        truncate=bool(values.get("truncate", True)),
    )


def _gguf_rope(metadata: Mapping[str, Any], arch: str, where: str) -> RopeScaling:
    kind = str(metadata.get(f"{arch}.rope.scaling.type", "none"))
    # Llama 3's frequencies are a tensor of the file (rope_freqs.weight): weights/base.py hands them over.
    if kind == "none":
        return RopeScaling()
    if kind not in ("linear", "yarn"):
        raise GraftuneError(f"rope scaling {kind!r} is not known", where=where, mend="known are linear and yarn")
    return RopeScaling(
        kind=kind,
        factor=float(metadata.get(f"{arch}.rope.scaling.factor", 1.0)),
        original_length=int(metadata.get(f"{arch}.rope.scaling.original_context_length", 0))
        or int(metadata.get(f"{arch}.context_length", 2048)),
        beta_fast=float(metadata.get(f"{arch}.rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(metadata.get(f"{arch}.rope.scaling.yarn_beta_slow", 1.0)),
        attention_multiplier=float(
            metadata.get(f"{arch}.rope.scaling.yarn_attn_factor", metadata.get(f"{arch}.rope.scaling.attn_factor", 1.0))
        ),
    )


def inverse_frequencies(width: int, theta: float, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """(1/frequency [H/2] in fp32, attention factor that multiplies cos and sin)."""
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    base = 1.0 / theta**exponents
    if scaling.kind == "none":
        return base, 1.0
    if scaling.kind == "linear":
        return base / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(base, scaling), 1.0
    return _yarn(base, theta, width, scaling)


def _llama3(base: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, and those between blended by their share."""
    wavelength = 2 * math.pi / base
    share = (scaling.original_length / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    share = share.clamp(0.0, 1.0)
    return (1 - share) * base / scaling.factor + share * base


def _yarn(base: torch.Tensor, theta: float, width: int, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """Frequencies that turn often within the original context are kept, slow ones interpolated, a ramp between."""

    def dimension(turns: float) -> float:
        return width * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = base / scaling.factor * ramp + base * (1 - ramp)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor:
        return frequencies, scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return frequencies, magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return frequencies, magnitude(1.0) * scaling.attention_multiplier
