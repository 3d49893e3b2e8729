"""Ropes in configurations and in GGUF metadata, read and written.

Newer configurations have `rope_parameters`, with theta inside and, where layers differ, one entry for each kind of
layer; older ones have `rope_theta`, `rope_local_base_freq` and `rope_scaling`. A GGUF has keys for linear and yarn
scaling, and tensors for the divisors of the others: one for each frequency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.model.families.reading import FileConfig
from graftune.model.rotary import RopeScaling, RopeSpec, inverse_frequencies, yarn_attention

WIDEST_HEAD = 1 << 14
DIVISORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
GGUF_TENSORS = (DIVISORS, SHORT, LONG)
KINDS = ("linear", "llama3", "yarn", "longrope", "proportional")


def read_ropes(
    config: FileConfig, head_width: int, where: str, *, partial: bool, local: bool
) -> tuple[RopeSpec, RopeSpec]:
    """The rope of the layers without a window and that of the layers with one. `partial`: the family may rotate a part
    of each head; `local`: its layers with a window have a rope of their own, which is never scaled."""
    values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    share = float(values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if share != 1 and not partial:
        raise GraftuneError("rotates only a part of each head", where=where, fix="this variant is not supported")
    own: Mapping[str, Any] = {}
    if "full_attention" in values or "sliding_attention" in values:
        own = values.get("sliding_attention") or {}
        values = dict(values.get("full_attention") or {})
        if values.get("partial_rotary_factor", 1) != 1 and values.get("rope_type") != "proportional":
            raise GraftuneError("rotates only a part of each head", where=where, fix="this variant is not supported")
        if (own.get("rope_type") or "default") != "default":
            raise GraftuneError("scales the rope of its windows", where=where, fix="this variant is not supported")
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    width = int(head_width * share + 1e-6)
    full = RopeSpec(width, theta, _scaling(values, config, where))
    if not local:
        return full, full
    return full, RopeSpec(width, float(own.get("rope_theta") or config.get("rope_local_base_freq") or theta))


def _scaling(values: FileConfig, config: FileConfig, where: str) -> RopeScaling:
    kind = str(values.get("rope_type") or values.get("type") or "default")
    divisors = tuple(values.get("divisors") or ())  # never in a config.json: see gguf_scaling
    if kind == "default":
        return RopeScaling(divisors=divisors)
    if kind not in KINDS:
        raise GraftuneError(f"rope scaling {kind!r} is not known", where=where, fix=f"known are {', '.join(KINDS)}")
    if kind == "longrope" and not (values.get("short_factor") and values.get("long_factor")):
        raise GraftuneError(
            "rope scaling 'longrope' has no short_factor or no long_factor",
            where=where,
            fix="download the model again",
        )
    longest = config.get("max_position_embeddings", 2048)
    original = values.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    usual = int(longest) / int(original or longest) if kind == "longrope" else 1.0
    return RopeScaling(
        kind=kind,
        factor=usual if values.get("factor") is None else float(values["factor"]),
        original_length=int(original or longest),
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        attention_factor=float(values.get("attention_factor") or 0.0),
        mscale=float(values.get("mscale") or 0.0),
        mscale_all_dim=float(values.get("mscale_all_dim") or 0.0),
        truncate=bool(values.get("truncate", True)),
        share=float(values.get("partial_rotary_factor") or 1.0) if kind == "proportional" else 1.0,
        short=tuple(float(f) for f in values.get("short_factor") or ()),
        long=tuple(float(f) for f in values.get("long_factor") or ()),
        divisors=divisors,
    )


def written_scaling(rope: RopeSpec, where: str) -> dict[str, Any] | None:
    """The value of `rope_scaling` in a configuration; None: the rope is not scaled."""
    scaling = _llama3_of(rope, where) if rope.scaling.divisors else rope.scaling
    if scaling.kind == "none":
        return None
    _, attention = inverse_frequencies(rope.width, rope.theta, rope.scaling)
    if scaling.kind == "longrope":
        return {
            "rope_type": "longrope",
            "type": "longrope",
            "short_factor": list(scaling.short),
            "long_factor": list(scaling.long),
            "attention_factor": attention,
        }
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        values |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "attention_factor": attention}
        values |= {} if scaling.truncate else {"truncate": False}
    if scaling.kind == "proportional":
        return values | {"partial_rotary_factor": scaling.share}
    if scaling.kind != "linear":
        values["original_max_position_embeddings"] = scaling.original_length
    return values


def _llama3_of(rope: RopeSpec, where: str) -> RopeScaling:
    """The settings of Llama 3's scaling that give the divisors which a GGUF stores."""
    wanted = inverse_frequencies(rope.width, rope.theta, rope.scaling)[0]
    for power in range(5, 21):
        tried = RopeScaling("llama3", factor=max(rope.scaling.divisors), original_length=1 << power)
        if torch.allclose(inverse_frequencies(rope.width, rope.theta, tried)[0], wanted, rtol=1e-4, atol=0):
            return tried
    raise GraftuneError(
        "its rope frequencies have no name in a Hugging Face configuration, so the model could not be saved",
        where=where,
        fix="train the model from its Hugging Face folder, or with method lora",
    )


def gguf_scaling(
    metadata: FileConfig, tensors: Mapping[str, Any], arch: str, head_width: int, where: str
) -> dict[str, Any]:
    """A GGUF's scaling as the `rope_scaling` of a configuration, with one more key: `divisors` of the frequencies."""
    stem = f"{arch}.rope.scaling"
    if metadata.get(f"{stem}.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise GraftuneError("yarn_ext_factor is not known", where=where, fix="use a file without it")
    kind = str(metadata.get(f"{stem}.type", "none"))
    attention = float(metadata.get(f"{stem}.yarn_attn_factor", metadata.get(f"{stem}.attn_factor", 1.0)))
    values: dict[str, Any] = {"original_max_position_embeddings": metadata.get(f"{stem}.original_context_length")}
    if DIVISORS in tensors:
        if tuple(tensors[DIVISORS].shape) != (head_width // 2,):
            raise GraftuneError(
                f"{DIVISORS} is {list(tensors[DIVISORS].shape)} where heads are {head_width} wide",
                where=where,
                fix="download the model again",
            )
        values["divisors"] = tensors[DIVISORS].values().float().tolist()
    if SHORT in tensors and LONG in tensors:
        for name in (SHORT, LONG):
            if math.prod(tensors[name].shape) > WIDEST_HEAD // 2:
                raise GraftuneError(f"tensor {name} is longer than any head", where=where, fix="download it again")
        short, long = (tensors[name].values().tolist() for name in (SHORT, LONG))
        return values | {
            "rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention
        }  # fmt: skip
    if kind == "none":
        return values | {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise GraftuneError(f"rope scaling {kind!r} is not known", where=where, fix="known are linear and yarn")
    factor = float(metadata.get(f"{stem}.factor", 1.0))
    values |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        values |= {
            "beta_fast": metadata.get(f"{stem}.yarn_beta_fast"),
            "beta_slow": metadata.get(f"{stem}.yarn_beta_slow"),
            "attention_factor": yarn_attention(factor) * attention,
        }
    return values


def gguf_keys(rope: RopeSpec, truncates_yarn: bool = True) -> dict[str, Any]:
    """The keys of the scaling in a GGUF, without the architecture's prefix. `truncates_yarn`: whether readers truncate
    yarn in files of this family."""
    scaling = rope.scaling
    if scaling.kind in ("none", "llama3", "proportional"):  # the last two are tensors: see gguf_tensors
        return {}
    attention = inverse_frequencies(rope.width, rope.theta, scaling)[1]
    if scaling.kind == "longrope":  # its divisors are tensors
        return {"rope.scaling.original_context_length": scaling.original_length, "rope.scaling.attn_factor": attention}
    found: dict[str, Any] = {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor)}
    if scaling.kind == "yarn":
        found["rope.scaling.original_context_length"] = scaling.original_length
        if scaling.truncate != truncates_yarn:
            with_ = "with" if scaling.truncate else "without"
            raise GraftuneError(f"GGUF has no key for yarn {with_} truncation", fix="export to merged or peft")
        # llama.cpp already multiplies by the attention factor that follows from `factor`: only the rest is written.
        rest = attention / yarn_attention(scaling.factor)
        if not math.isclose(rest, 1.0, rel_tol=1e-6):
            found["rope.scaling.attn_factor"] = rest
        if scaling.beta_fast != 32.0:
            found["rope.scaling.yarn_beta_fast"] = float(scaling.beta_fast)
        if scaling.beta_slow != 1.0:
            found["rope.scaling.yarn_beta_slow"] = float(scaling.beta_slow)
    return found


def gguf_tensors(rope: RopeSpec) -> dict[str, torch.Tensor]:
    """The divisors of frequencies that a GGUF carries as tensors."""
    scaling = rope.scaling
    found: dict[str, torch.Tensor] = {}
    if scaling.divisors:
        found[DIVISORS] = torch.tensor(scaling.divisors)
    if scaling.kind == "llama3":
        plain = inverse_frequencies(rope.width, rope.theta, RopeScaling())[0]
        found[DIVISORS] = plain / inverse_frequencies(rope.width, rope.theta, scaling)[0]
    if scaling.kind == "longrope":
        found |= {SHORT: torch.tensor(scaling.short), LONG: torch.tensor(scaling.long)}
    return found
