"""What a decoder looks like. Families differ by these values alone; hf_config.py and gguf_metadata.py read them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from graftune.model.rotary import Rope, RopeScaling, inverse_frequencies

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
