"""One tensor's names: ours is Hugging Face's behind its `model.` prefix; a family knows those that differ, and GGUF's.

layers.3.self_attn.q_proj.weight   model.layers.3.self_attn.q_proj.weight   blk.3.attn_q.weight
"""

from __future__ import annotations

PEFT_PREFIX = "base_model.model."


def to_hf(ours: str) -> str:
    return ours if ours.startswith("lm_head.") else f"model.{ours}"


def from_hf(name: str) -> str:
    return name.removeprefix("model.")


def to_peft(ours: str) -> str:
    return PEFT_PREFIX + to_hf(ours)


def from_peft(name: str) -> str:
    return from_hf(name.removeprefix(PEFT_PREFIX))
