"""The specification in a GGUF's metadata, under llama.cpp's names; what those leave open, the tensors decide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from graftune.errors import GraftuneError
from graftune.model.families import ARCHITECTURES, FAMILIES, Family
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

# llama.cpp knows these models by their depth: they divide scores by the root of width / heads, all others of a head's.
_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
WIDEST_HEAD = 1 << 14


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str) -> ModelSpec:
    """GGUF metadata. `tensors` (name -> anything with a shape) decides what the metadata leaves open."""
    arch = str(metadata.get("general.architecture", ""))
    if ARCHITECTURES.get(arch, arch) not in FAMILIES:
        raise unknown_family(arch, where)
    experts = bool(metadata.get(f"{arch}.expert_count"))
    if "token_embd.weight" not in tensors:
        raise GraftuneError("holds no model weights (no token_embd.weight)", where=where, fix="give a full model file")
    get = Getter(metadata, where, f"{arch}.")
    width, heads, layers = get.whole("embedding_length"), get.whole("attention.head_count"), get.whole("block_count")
    window = int(metadata.get(f"{arch}.attention.sliding_window", 0))
    name = "olmo3" if arch == "olmo2" and window else ARCHITECTURES.get(arch, arch)
    if name == "llama":  # as llama.cpp calls Mistral's models too
        name = "mixtral" if experts else "mistral" if window else name
    family = FAMILIES[name]
    if experts != family.mixture:
        what = "is a mixture of experts" if experts else "has no experts"
        raise GraftuneError(f"{what}, other than models of {arch}", where=where, fix="this variant is not supported")
    theta = float(metadata.get(f"{arch}.rope.freq_base", 10000.0))
    head_width = int(metadata.get(f"{arch}.attention.key_length", width // heads))
    turned = int(metadata.get(f"{arch}.rope.dimension_count", head_width))
    if not family.part_of_head:
        check_whole_heads(turned / head_width, where)
    if metadata.get(f"{arch}.rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise GraftuneError("yarn_ext_factor is not known", where=where, fix="use a file without it")
    scale = number(metadata, f"{arch}.attention.scale", 0.0)
    if _BY_WIDTH.get(arch) == layers:
        scale = (width / heads) ** -0.5
    windows = _windows(metadata.get(f"{arch}.attention.sliding_window_pattern"), family, layers) if window else ()
    declared = metadata.get(f"{arch}.attention.head_count_kv", heads)  # a list: none in layers without attention
    key_heads = declared if family.convolves and isinstance(declared, list) else [int(declared)]
    if key_heads is declared and (len({n for n in key_heads if n}) != 1 or len(key_heads) != layers):
        raise GraftuneError("has other heads in some layers", where=where, fix="this variant is not supported")
    local_theta = number(
        metadata, f"{arch}.rope.freq_base_swa", theta if family.local_theta < 0 else family.local_theta
    )
    return ModelSpec(
        family=name,
        layers=layers,
        width=width,
        ffn=get.whole("expert_feed_forward_length" if name == "qwen3_moe" else "feed_forward_length"),
        heads=heads,
        kv_heads=max(key_heads),
        head_width=head_width,
        vocab=int(tensors["token_embd.weight"].shape[0]),
        norm_eps=float(metadata.get(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)),
        rope_theta=theta,
        max_positions=int(metadata.get(f"{arch}.context_length", 2048)),
        tied="output.weight" not in tensors,
        **by_name(family),
        activation=family.activation,
        window=window if windows else 0,
        window_layers=windows,
        rope=_rope(metadata, tensors, arch, where),
        local_theta=local_theta if family.local_theta else 0.0,
        unrotated_layers=unrotated_layers({}, name, layers),
        rotated=0 if turned == head_width else turned,
        embedding_scale=math.sqrt(width)
        if family.scaled_embedding
        else number(metadata, f"{arch}.embedding_scale", 1.0),
        attention_scale=scale,
        attention_cap=number(metadata, f"{arch}.attn_logit_softcapping", 0.0),
        residual_scale=number(metadata, f"{arch}.residual_scale", 1.0),
        logit_scale=1.0 / number(metadata, f"{arch}.logit_scale", 1.0),
        logit_cap=number(metadata, f"{arch}.final_logit_softcapping", 0.0),
        conv_layers=tuple(i for i, n in enumerate(key_heads) if not n) if key_heads is declared else (),
        conv_taps=get.whole("shortconv.l_cache") if family.convolves else 0,
        **(experts_of(get.whole("expert_count"), get.whole("expert_used_count"), where) if experts else {}),
    )


def _windows(pattern: Any, family: Family, layers: int) -> tuple[int, ...]:
    """Which layers have one: a list of them in newer files, or a number: every such layer has none."""
    if isinstance(pattern, list):
        return tuple(i for i, windowed in enumerate(pattern) if windowed)
    if family.windows != "alternate":
        return tuple(each(layers)) if family.windows == "all" else ()
    step = int(pattern or family.pattern)
    return tuple(i for i in each(layers) if (i + 1) % step)


def _rope(metadata: Mapping[str, Any], tensors: Mapping[str, Any], arch: str, where: str) -> RopeScaling:
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
                raise GraftuneError(f"tensor {name} is longer than any head", where=where, fix="download it again")
        short, long = (tuple(tensors[name].values().tolist()) for name in lists)
        return RopeScaling(
            "longrope", original_length=original, attention_factor=float(attention), short=short, long=long
        )
    # Llama 3's frequencies are a tensor of the file (rope_freqs.weight): weights/base.py hands them over.
    if kind == "none":
        return RopeScaling()
    if kind not in ("linear", "yarn"):
        raise GraftuneError(f"rope scaling {kind!r} is not known", where=where, fix="known are linear and yarn")
    return RopeScaling(
        kind=kind,
        factor=float(metadata.get(f"{arch}.rope.scaling.factor", 1.0)),
        original_length=original,
        beta_fast=float(metadata.get(f"{arch}.rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(metadata.get(f"{arch}.rope.scaling.yarn_beta_slow", 1.0)),
        attention_multiplier=float(attention),
    )
