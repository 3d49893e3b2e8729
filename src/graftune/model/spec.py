"""The spec of a decoder: an embedding, a tuple of layer specs and a head.

Each layer's mixer and feed-forward have their own sizes, so that layers may differ in anything. The files of
model/families/ make a spec out of a Hugging Face configuration or GGUF metadata; everything else reads the spec.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from graftune.model.layer_inputs import LayerInputSpec
from graftune.model.layer_spec import LayerSpec, NormSpec
from graftune.model.part import AttentionShape, PartSpec
from graftune.model.rotary import RopeSpec


@dataclass(frozen=True)
class EmbeddingSpec:
    vocab: int
    width: int
    scale: float = 1.0
    norm_eps: float | None = None  # of a norm without weight over each embedding; None: there is none


@dataclass(frozen=True)
class HeadSpec:
    """The final norm and the output projection, which a tied head shares with the embedding."""

    norm: NormSpec
    tied: bool
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # soft cap of the logits; 0: none


@dataclass(frozen=True)
class ModelSpec:
    family: str
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    head: HeadSpec
    max_positions: int
    layer_inputs: LayerInputSpec | None = None  # what layers read beside the stream; None: nothing

    @property
    def width(self) -> int:
        return self.embedding.width

    @property
    def vocab(self) -> int:
        return self.embedding.vocab

    @property
    def tied(self) -> bool:
        return self.head.tied

    @cached_property
    def kinds(self) -> Counter[LayerSpec]:
        """How many layers there are of each kind."""
        return Counter(self.layers)

    @cached_property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct ropes of the layers: a pass computes one pair of rotary tables for each."""
        return tuple(dict.fromkeys(rope for kind in self.kinds for part in kind.parts for rope in part.ropes))

    @cached_property
    def attention(self) -> tuple[AttentionShape, ...]:
        """The distinct shapes of attention, in the order of the layers."""
        found = (part.attention for kind in self.kinds for part in kind.parts)
        return tuple(dict.fromkeys(shape for shape in found if shape is not None))

    @property
    def expert_counts(self) -> tuple[int, int]:
        """The number of experts of a mixture's layers, and how many are chosen for a token; zeros: it is dense."""
        return max((part.expert_counts for kind in self.kinds for part in kind.parts), default=(0, 0))

    @property
    def experts(self) -> int:
        return self.expert_counts[0]

    @property
    def recurrent(self) -> bool:
        """Whether some layers have a state in place of attention."""
        return any(part.state_values for kind in self.kinds for part in kind.parts)

    @property
    def projections(self) -> tuple[str, ...]:
        """The paths, after `layers.N.`, of all projections that adapters may be attached to."""
        return tuple(dict.fromkeys(name for kind in self.kinds for name in kind.projections))

    @property
    def parameters(self) -> int:
        layers = sum(count * kind.parameters for kind, count in self.kinds.items())
        inputs = 0 if self.layer_inputs is None else self.layer_inputs.parameters
        return layers + inputs + self.vocab * self.width * (1 if self.tied else 2)

    @property
    def table_values(self) -> int:
        """Values of the tables that stay in the compute dtype where projections are quantised."""
        inputs = 0 if self.layer_inputs is None else self.layer_inputs.table_values
        return inputs + self.vocab * self.width * (1 if self.tied else 2)

    def wrong(self) -> str | None:
        """Names the first group of values that no model has (a damaged file may state anything); None: all are fine."""
        norms = [self.head.norm, *(norm for kind in self.kinds for norm in kind.norms)]
        scales = [branch.scale for kind in self.kinds for branch in kind.branches]
        scales += [self.embedding.scale, self.head.logit_scale]
        checks = [(name, fine) for kind in self.kinds for part in kind.parts for name, fine in part.checks.items()]
        epsilons = [norm.eps for norm in norms] + [self.embedding.norm_eps or 0.0]
        checks.append(("norm epsilon", all(0 <= eps < 1 for eps in epsilons)))
        checks.append(("scales", all(0 < scale < math.inf for scale in scales)))
        checks.append(("caps", 0 <= self.head.logit_cap < math.inf))
        if all(fine for _, fine in checks):
            checks.append(("rope scaling", all(rope.is_sound for rope in self.ropes)))
        return next((name for name, fine in checks if not fine), None)

    def part_of(self, name: str) -> tuple[PartSpec | None, str]:
        """The part that contains a tensor or adapter, given by our name, and its name there. None: no layer's part."""
        first, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        if first != "layers" or not number.isdecimal() or int(number) >= len(self.layers):
            return None, name
        found = [(part, inner) for part in self.layers[int(number)].parts if (inner := part.own_name(rest)) is not None]
        # A part's module may be inside another part's module: take the innermost.
        return max(found, key=lambda each: len(each[0].module), default=(None, name))

    @cached_property
    def _norm_offsets(self) -> dict[str, float]:
        found = {self.head.norm.name: self.head.norm.offset}
        for index, layer in enumerate(self.layers):
            inner = {part.named(name): part.norm_offset_of(name) for part in layer.parts for name in part.norms}
            inner |= {norm.name: norm.offset for norm in layer.norms}
            found |= {f"layers.{index}.{name}": offset for name, offset in inner.items()}
        return found

    def norm_offset(self, name: str) -> float:
        """The offset of a norm, given by our name of its weight (NormSpec.offset); 0 for any other tensor."""
        return self._norm_offsets.get(name.removesuffix(".weight"), 0.0)

    def only(self, layers: Sequence[int]) -> ModelSpec:
        """A model made of these layers of this one, in this order. A layer that uses the keys of another layer needs
        that layer before it."""
        places: dict[int, int] = {}
        chosen = []
        for place, index in enumerate(layers):
            chosen.append(self.layers[index].moved(places))
            places[index] = place
        return replace(self, layers=tuple(chosen))

    def with_vocab(self, count: int) -> ModelSpec:
        return replace(self, embedding=replace(self.embedding, vocab=count))

    def describe(self) -> dict[str, Any]:
        """The main figures, for people and logs; heads are those of the first layer that has attention."""
        shape = self.attention[0] if self.attention else AttentionShape(0, 0, 0)
        return {
            "family": self.family,
            "layers": len(self.layers),
            "width": self.width,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_width": shape.head_width,
            "experts": self.experts,
            "vocab": self.vocab,
            "tied": self.tied,
            "max_positions": self.max_positions,
            "parameters": self.parameters,
        }
