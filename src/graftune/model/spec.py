"""What a decoder looks like. Families differ by these values alone; hf_config.py and gguf_metadata.py read them.

A configuration states most values once for all layers, and so does `ModelSpec`; `layer` says what a layer is made of:
the specs of its mixer and its feed-forward. Whoever asks for tensors, projections or adapters asks those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from graftune.errors import GraftuneError
from graftune.model.feed_forward.experts import ExpertsSpec
from graftune.model.feed_forward.gated import GatedSpec
from graftune.model.layer_spec import BranchPart, BranchSpec, LayerSpec, NormSpec
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.mixers.short_conv import ShortConvSpec
from graftune.model.part import FeedForwardSpec, MixerSpec, PartSpec
from graftune.model.rotary import Rope, RopeScaling, inverse_frequencies

# The norms of a layer by their place: before and behind the mixer, before and behind the feed-forward.
NORMS = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "operator": ("operator_norm", None, "ffn_norm", None),
    "behind": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
}


MOST_LAYERS = 1 << 16  # of a sane file
# The fields of ModelSpec that list layers.
LISTS = ("window_layers", "unrotated_layers", "conv_layers")


class Names(NamedTuple):
    """How a family's checkpoints call what others have too."""

    attention_out: str = "o_proj"
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    mlp: str = "mlp"
    gated: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    final_norm: str = "norm"


NAMES = {
    "lfm2": Names("out_proj", ("q_layernorm", "k_layernorm"), "feed_forward", ("w1", "w3", "w2"), "embedding_norm"),
}


@dataclass(frozen=True)
class LayerSizes:
    """What one layer has of its own, where the layers of a model differ in size; 0: what the model says."""

    heads: int = 0
    kv_heads: int = 0
    head_width: int = 0
    ffn: int = 0
    rotated: int = 0


class RopeKind(NamedTuple):
    """Layers with the same one share rotary tables."""

    width: int  # columns of a head that are turned
    local: bool = False  # by `local_theta`
    turned: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """The values of a configuration. Sizes may differ by layer (`own`): ask `layer(index)` for those of a layer."""

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
    attention_cap: float = 0.0  # soft cap of the attention scores (a tanh); 0: none
    residual_scale: float = 1.0  # of what a mixer or feed-forward adds to the residual stream
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    experts: int = 0  # of each layer's MLP; 0: it is dense. ffn is then one expert's
    experts_chosen: int = 0  # for each token
    experts_normalised: bool = True  # whether the weights of the chosen sum to one
    conv_layers: tuple[int, ...] = ()  # layers with a short convolution in place of attention
    conv_taps: int = 0
    own: tuple[LayerSizes, ...] = ()  # of every layer, where they differ

    def layer(self, index: int) -> LayerSpec:
        if index not in self._layers:
            before_mixer, after_mixer, before, after = (
                None if name is None else NormSpec(name, self.width, self.norm_eps, self.norm_shift)
                for name in NORMS[self.norms]
            )
            mixing = BranchPart(self._mixer(index), before_mixer, after_mixer)
            feeding = BranchPart(self._feed_forward(index), before, after)
            scale = self.residual_scale
            self._layers[index] = LayerSpec((BranchSpec((mixing,), scale=scale), BranchSpec((feeding,), scale=scale)))
        return self._layers[index]

    @cached_property
    def _layers(self) -> dict[int, LayerSpec]:
        """Those that were asked for: loading asks for a layer once a tensor."""
        return {}

    @property
    def names(self) -> Names:
        return NAMES.get(self.family, Names())

    def _mixer(self, layer: int) -> MixerSpec:
        if layer in self.conv_layers:
            return ShortConvSpec(self.width, self.conv_taps)
        sizes = self.sizes(layer)
        return AttentionSpec(
            width=self.width,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_width=sizes.head_width,
            norm_eps=self.norm_eps,
            score_scale=self.attention_scale or sizes.head_width**-0.5,
            score_cap=self.attention_cap,
            window=self.window if layer in self.window_layers else 0,
            rope=self.rope_kinds.index(self._rope_kind(layer)),
            bias=self.qkv_bias,
            fused=self.fused,
            qk_norm=self.qk_norm,
            wide_qk_norm=self.wide_qk_norm,
            out=self.names.attention_out,
            qk_norms=self.names.qk_norms,
        )

    def _feed_forward(self, layer: int) -> FeedForwardSpec:
        ffn = self.sizes(layer).ffn
        if self.experts:
            return ExpertsSpec(self.width, ffn, self.experts, self.experts_chosen, self.experts_normalised)
        return GatedSpec(self.width, ffn, self.activation, self.fused, self.names.mlp, self.names.gated)

    def sizes(self, layer: int) -> LayerSizes:
        """A layer's own, filled up with the model's."""
        own = self.own[layer] if self.own else LayerSizes()
        return LayerSizes(**{f.name: getattr(own, f.name) or getattr(self, f.name) for f in fields(LayerSizes)})

    def part_of(self, name: str) -> tuple[PartSpec | None, str]:
        """The part that a tensor or adapter, by our name, is in, and its name there. None: in no part of a layer."""
        first, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        module, _, inner = rest.partition(".")
        if first == "layers" and number.isdecimal() and int(number) < self.layers:
            for part in self.layer(int(number)).parts:
                if part.module == module:
                    return part, inner
        return None, name

    def only(self, layers: Sequence[int]) -> ModelSpec:
        """A model made of these layers of this one, in this order."""

        def kept(some: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(place for place, index in enumerate(layers) if index in some)

        lists: dict[str, Any] = {name: kept(getattr(self, name)) for name in LISTS}
        own = tuple(self.own[index] for index in layers) if self.own else ()
        return replace(self, layers=len(layers), own=own, **lists)

    @cached_property
    def kinds(self) -> Counter[LayerSpec]:
        """How many layers there are of each kind."""
        if self.layers > MOST_LAYERS:
            raise GraftuneError(f"its configuration says {self.layers} layers", fix="download the model again")
        return Counter(self.layer(index) for index in range(self.layers))

    @property
    def projections(self) -> tuple[str, ...]:
        """The names of all that adapters may lie on."""
        return tuple(dict.fromkeys(name for kind in self.kinds for name in kind.projections))

    @property
    def parameters(self) -> int:
        layers = sum(count * kind.parameters for kind, count in self.kinds.items())
        return layers + self.vocab * self.width * (1 if self.tied else 2)

    @property
    def score_scale(self) -> float:
        return self.attention_scale or self.head_width**-0.5

    def describe(self) -> dict[str, Any]:
        return asdict(self) | {"parameters": self.parameters}

    def inverse_frequencies(self) -> tuple[torch.Tensor, float]:
        """Of the layers without a window, for short texts."""
        return inverse_frequencies(self.rotated or self.head_width, self.rope_theta, self.rope)

    @cached_property
    def rope_kinds(self) -> tuple[RopeKind, ...]:
        """What the rotary tables of a pass are made for, in their order. Where all layers have the same sizes the kinds
        of the whole model, whichever of its layers these are: a plan from a few of them has the same tables."""
        if self.own:
            attends = (i for i in range(self.layers) if i not in self.conv_layers)
            return tuple(sorted({self._rope_kind(i) for i in attends}, key=lambda kind: (not kind.turned, kind)))
        plain = RopeKind(self.rotated or self.head_width)
        local = (plain._replace(local=True),) if self.local_theta else ()
        return plain, *local, *((plain._replace(turned=False),) if self.unrotated_layers else ())

    def _rope_kind(self, layer: int) -> RopeKind:
        sizes = self.sizes(layer)
        kind = RopeKind(sizes.rotated or sizes.head_width)
        if layer in self.unrotated_layers:
            return kind._replace(turned=False)
        return kind._replace(local=bool(self.local_theta) and layer in self.window_layers)

    def ropes(self, factors: torch.Tensor | None = None) -> tuple[Rope, ...]:
        """A rope for each of `rope_kinds`. `factors`: divisors that a GGUF carries."""
        return tuple(self._rope(kind, factors) for kind in self.rope_kinds)

    def _rope(self, kind: RopeKind, factors: torch.Tensor | None) -> Rope:
        if not kind.turned:  # an angle of zero turns nothing
            return Rope(torch.zeros(kind.width // 2), 1.0)
        if kind.local:
            return Rope(*inverse_frequencies(kind.width, self.local_theta, RopeScaling()))
        frequencies, scaling = inverse_frequencies(kind.width, self.rope_theta, self.rope)
        far, limit = None, 0
        if self.rope.kind == "longrope":
            plain = inverse_frequencies(kind.width, self.rope_theta, RopeScaling())[0]
            far, limit = plain / torch.tensor(self.rope.long), self.rope.original_length
        return Rope(frequencies if factors is None else frequencies / factors, scaling, far, limit)

    @property
    def widest_head(self) -> int:
        """Of the layers that have attention: what a backend of attention has to serve."""
        found = [kind.mixer.head_width for kind in self.kinds if isinstance(kind.mixer, AttentionSpec)]
        return max(found, default=self.head_width)
