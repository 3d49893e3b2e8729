"""One tensor, three names: ours is Hugging Face's behind its `model.` prefix; GGUF's is a table of suffixes.

layers.3.self_attn.q_proj.weight   model.layers.3.self_attn.q_proj.weight   blk.3.attn_q.weight
"""

from __future__ import annotations

import re

PEFT_PREFIX = "base_model.model."
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
}
_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_BLOCK_BACK = {gguf: ours for ours, gguf in _BLOCK.items()}
_TOP_BACK = {gguf: ours for ours, gguf in _TOP.items()}


def from_gguf(name: str) -> str | None:
    """Our name, or None for a tensor that is not one of the model's weights (rope_freqs and the like)."""
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(.+)", stem):
        inner = _BLOCK_BACK.get(match[2])
        return f"layers.{match[1]}.{inner}.{kind}" if inner else None
    top = _TOP_BACK.get(stem)
    return f"{top}.{kind}" if top else None


def to_hf(ours: str) -> str:
    return ours if ours.startswith("lm_head.") else f"model.{ours}"


def from_hf(name: str) -> str:
    return name.removeprefix("model.")


def to_peft(ours: str) -> str:
    return PEFT_PREFIX + to_hf(ours)


def from_peft(name: str) -> str:
    return from_hf(name.removeprefix(PEFT_PREFIX))
