"""What reading a specification from config.json and from GGUF metadata have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graftune.errors import GraftuneError
from graftune.model.families import FAMILIES, Family


def unknown_family(model_type: str, where: str) -> GraftuneError:
    if model_type == "gemma3":
        return GraftuneError(
            "is a model of text and images",
            where=where,
            fix="give the text model (gemma3_text) or its GGUF, which holds the text part alone",
        )
    return GraftuneError(
        f"architecture {model_type or 'none'!r} is not known", where=where, fix=f"known are {', '.join(FAMILIES)}"
    )


def by_name(family: Family) -> dict[str, Any]:
    keys = ("qkv_bias", "qk_norm", "wide_qk_norm", "norms", "norm_shift", "fused")
    return {key: getattr(family, key) for key in keys}


class Getter:
    """Whole numbers that must be there and be positive."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = ""):
        self.values, self.where, self.prefix = values, where, prefix

    def whole(self, key: str) -> int:
        value = self.values.get(self.prefix + key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise GraftuneError(
                f"{self.prefix + key} is {value!r}", where=self.where, fix="it must be there, a whole number above 0"
            )
        return value


def number(values: Mapping[str, Any], key: str, default: float) -> float:
    """A value that may be missing or null."""
    value = values.get(key)
    return default if value is None else float(value)


def each(layers: int) -> range:
    """All layers, or as many as a sane file has: a damaged one may claim any number."""
    return range(min(layers, 1 << 16))


def check_whole_heads(share: float, where: str) -> None:
    if share != 1:
        raise GraftuneError("rotates only a part of each head", where=where, fix="this variant is not supported")


def experts_of(count: int, chosen: int, where: str) -> dict[str, Any]:
    if not chosen <= count <= 1 << 16:
        raise GraftuneError(f"chooses {chosen} of {count} experts", where=where, fix="download the model again")
    return {"experts": count, "experts_chosen": chosen}


def unrotated_layers(config: Mapping[str, Any], family: str, layers: int) -> tuple[int, ...]:
    """SmolLM3 leaves rope out of every fourth layer; `no_rope_layers` has a 0 there."""
    if family != "smollm3":
        return ()
    step = int(config.get("no_rope_layer_interval") or 4)
    turned = config.get("no_rope_layers") or [(i + 1) % step for i in each(layers)]
    return tuple(i for i, turns in enumerate(turned) if not turns)
