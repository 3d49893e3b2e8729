"""EXAONE 4: norms behind each part, and a norm on each head of queries and keys. The large model has windows on three
of four layers, and no rope on the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graftune.model.families.common import Family
from graftune.model.families.olmo import BEHIND
from graftune.model.families.reading import Config, Getter
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.part import MixerSpec

WINDOWED_LAYERS = 64  # llama.cpp gives windows to models with so many layers, and to no others


@dataclass(frozen=True)
class Exaone4(Family):
    def completed(self, config: Config) -> dict[str, Any]:
        """With the number of layers that a pattern such as LLLG (three local, one global) spans."""
        found = super().completed(config)
        pattern = found.get("sliding_window_pattern")
        if isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G":
            found["sliding_window_pattern"] = len(pattern)
        return found

    def mixers(self, get: Getter) -> list[MixerSpec]:
        found = super().mixers(get)
        if not get.config.get("sliding_window"):
            return found
        attention = self.attention(get)
        unrotated: AttentionSpec = replace(attention, rope=replace(attention.rope, enabled=False))
        return [unrotated if mixer == attention else mixer for mixer in found]

    def gguf_config(self, metadata: Config, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        config = super().gguf_config(metadata, tensors, where)
        if config["num_hidden_layers"] != WINDOWED_LAYERS:
            return config | {"sliding_window": None}
        return config | {"sliding_window": config["sliding_window"] or self.defaults["sliding_window"]}


EXAONE = (
    Exaone4(
        "exaone4",
        "Exaone4ForCausalLM",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
        qk_norm=True,
        windows="alternate",
        pattern=4,
        windows_in_llama_cpp=True,
        **BEHIND,
    ),
)
