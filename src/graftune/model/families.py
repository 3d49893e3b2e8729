"""The families of models that are known, each by what its name alone says. All else stands in a model's configuration.

A family is a row of this table and nothing more: no copy of the forward, no class of its own. To add one, say where its
norms are, how its projections are called, what its configuration leaves unsaid, and which layers have a window.
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    norms: str = "before"  # each part: before | around (before and behind) | behind, ahead of the add; operator: LFM2's
    norm_shift: float = 0.0  # what is to be added to norm weights as checkpoints of Hugging Face hold them
    activation: str = "silu"  # silu | gelu (tanh's)
    qkv_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False  # over all heads together
    fused: bool = False  # q, k and v are one projection, gate and up another
    tied: bool = False  # where the configuration does not say
    theta: float = 10000.0  # likewise
    local_theta: float = 0.0  # rope base of layers with a window, never stretched; 0: as the others; -1: as theta
    scaled_embedding: bool = False  # by the root of the width
    windows: str = "none"  # which layers have one, unless layer_types says so: none | all | configured | alternate
    pattern: int = 0  # alternate: every such layer has none
    part_of_head: bool = False  # whether rope may turn a part of each head
    mixture: bool = False  # of experts, in every layer
    convolves: bool = False  # some layers have a short convolution in place of attention
    hf_class: str = ""


FAMILIES: dict[str, Family] = {
    "llama": Family(hf_class="LlamaForCausalLM"),
    "mistral": Family(windows="all", hf_class="MistralForCausalLM"),
    "mixtral": Family(windows="all", mixture=True, hf_class="MixtralForCausalLM"),
    "qwen2": Family(qkv_bias=True, windows="configured", hf_class="Qwen2ForCausalLM"),
    "qwen3": Family(qk_norm=True, windows="configured", hf_class="Qwen3ForCausalLM"),
    "qwen3_moe": Family(qk_norm=True, windows="configured", mixture=True, hf_class="Qwen3MoeForCausalLM"),
    "gemma2": Family(
        norms="around",
        norm_shift=1.0,
        activation="gelu",
        tied=True,
        scaled_embedding=True,
        windows="alternate",
        pattern=2,
        hf_class="Gemma2ForCausalLM",
    ),
    "gemma3": Family(
        norms="around",
        norm_shift=1.0,
        activation="gelu",
        qk_norm=True,
        tied=True,
        theta=1_000_000.0,
        local_theta=10_000.0,
        scaled_embedding=True,
        windows="alternate",
        pattern=6,
        hf_class="Gemma3ForCausalLM",
    ),
    "phi3": Family(fused=True, windows="all", part_of_head=True, hf_class="Phi3ForCausalLM"),
    "granite": Family(hf_class="GraniteForCausalLM"),
    "smollm3": Family(tied=True, theta=2_000_000.0, windows="configured", hf_class="SmolLM3ForCausalLM"),
    "lfm2": Family(
        norms="operator", qk_norm=True, tied=True, theta=1_000_000.0, convolves=True, hf_class="Lfm2ForCausalLM"
    ),
    "olmo2": Family(norms="behind", qk_norm=True, wide_qk_norm=True, hf_class="Olmo2ForCausalLM"),
    "olmo3": Family(
        norms="behind",
        qk_norm=True,
        wide_qk_norm=True,
        theta=500_000.0,
        local_theta=-1.0,
        windows="alternate",
        pattern=4,
        hf_class="Olmo3ForCausalLM",
    ),
}
ARCHITECTURES = {"qwen3moe": "qwen3_moe"}  # likewise, GGUF's
MODEL_TYPES = {"gemma3_text": "gemma3"}  # Hugging Face's names that are not the family's
