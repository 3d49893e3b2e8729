"""What the families share whose configurations list the kind of each layer and the base of its rope."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from graftune.model.families.common import Family
from graftune.model.families.reading import Getter
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.part import MixerSpec
from graftune.model.spec import ModelSpec


@dataclass(frozen=True)
class LayerThetas(Family):
    """A base of 0 means no rope. Every fourth layer has no window where nothing else is said."""

    from_last: bool = False  # these are counted from the last layer on, not from the first
    rope_with_window: bool = False  # layers without a window have no rope where nothing else is said

    def windowed(self, get: Getter) -> list[bool]:
        if get.config.get("layer_types"):
            return [kind == "sliding_attention" for kind in get.by_layer(get.config["layer_types"])]
        found = [index % 4 != 0 for index in range(get.layers())]
        return found[::-1] if self.from_last else found

    def mixers(self, get: Getter) -> list[MixerSpec]:
        windowed, listed = self.windowed(get), get.config.get("layer_rope_theta")
        thetas = (
            get.by_layer(listed) if listed else [has_window or not self.rope_with_window for has_window in windowed]
        )
        found: list[MixerSpec] = []
        for mixer, theta in zip(super().mixers(get), thetas, strict=True):
            assert isinstance(mixer, AttentionSpec)
            base = float(theta) if listed and theta else mixer.rope.theta
            found.append(replace(mixer, rope=replace(mixer.rope, theta=base, enabled=bool(theta))))
        return found

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        ropes = [layer.mixer.ropes[0] for layer in spec.layers]
        return super().config(spec, where) | {"layer_rope_theta": [rope.theta if rope.enabled else 0 for rope in ropes]}

    def gguf_keys(self, spec: ModelSpec, where: str) -> dict[str, Any]:
        shapes = [layer.mixer.attention for layer in spec.layers]
        pattern = [shape is not None and shape.window > 0 for shape in shapes]
        return super().gguf_keys(spec, where) | {"attention.sliding_window_pattern": pattern}
