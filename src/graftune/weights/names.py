"""One tensor, three names: ours is Hugging Face's behind its `model.` prefix; GGUF's is a table of suffixes.

layers.3.self_attn.q_proj.weight   model.layers.3.self_attn.q_proj.weight   blk.3.attn_q.weight
"""

from __future__ import annotations

import re

PEFT_PREFIX = "base_model.model."
# The modules that a projection may be in, over all kinds of layers.
MODULES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"), ("self_attn",)),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "down_proj"), ("mlp",)),
    "in_proj": ("conv",),
    "out_proj": ("self_attn", "conv"),
    **dict.fromkeys(("w1", "w2", "w3"), ("feed_forward",)),
}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_BEHIND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_AROUND = _BEHIND | {"pre_feedforward_layernorm": "ffn_norm"}
# Where an architecture of GGUF names things otherwise: norms by what they are before or behind of.
_OTHERWISE = {
    "gemma2": _AROUND,
    "gemma3": _AROUND,
    "olmo2": _BEHIND,
    "lfm2": {
        "operator_norm": "attn_norm",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "conv.in_proj": "shortconv.in_proj",
        "conv.conv": "shortconv.conv",
        "conv.out_proj": "shortconv.out_proj",
        "ffn_norm": "ffn_norm",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w3": "ffn_up",
        "feed_forward.w2": "ffn_down",
    },
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
}
_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_TOP_OTHERWISE = {"lfm2": {"embedding_norm": "token_embd_norm"}}


def _top(arch: str) -> dict[str, str]:
    return _TOP | _TOP_OTHERWISE.get(arch, {})


def _block(arch: str) -> dict[str, str]:
    return _BLOCK | _OTHERWISE.get(arch, {})


def from_gguf(name: str, arch: str = "llama") -> str | None:
    """Our name in a file of this architecture, or None for a tensor that is not one of the model's weights (rope_freqs
    and the like)."""
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(.+)", stem):
        back = {gguf: ours for ours, gguf in _block(arch).items()}
        inner = back.get(match[2])
        return f"layers.{match[1]}.{inner}.{kind}" if inner else None
    top = {gguf: ours for ours, gguf in _top(arch).items()}.get(stem)
    return f"{top}.{kind}" if top else None


def to_gguf(ours: str, arch: str = "llama") -> str | None:
    """GGUF's name of one of our tensors in a file of this architecture, or None if it has none there."""
    stem, _, kind = ours.rpartition(".")
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", stem):
        inner = _block(arch).get(match[2])
        return f"blk.{match[1]}.{inner}.{kind}" if inner else None
    top = _top(arch).get(stem)
    return f"{top}.{kind}" if top else None


def to_hf(ours: str) -> str:
    return ours if ours.startswith("lm_head.") else f"model.{ours}"


def from_hf(name: str) -> str:
    return name.removeprefix("model.")


def to_peft(ours: str) -> str:
    return PEFT_PREFIX + to_hf(ours)


def from_peft(name: str) -> str:
    return from_hf(name.removeprefix(PEFT_PREFIX))
