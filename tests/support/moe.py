"""Tiny random mixtures of experts: one layer of them (-small), or wide enough for blocks of 256 values (-wide)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support import tiny

VARIANTS = ("qwen3_moe", "qwen3_moe-unnormalised", "mixtral")
EXPERTS, CHOSEN = 6, 3


def hf_config(variant: str) -> Any:
    import transformers

    wide, small = variant.endswith("-wide"), variant.endswith("-small")
    common: dict[str, Any] = {
        "vocab_size": tiny.VOCAB, "hidden_size": 256 if wide else 48, "num_attention_heads": 6,
        "num_hidden_layers": 1 if small else 2 if wide else 3,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": False,
        "num_experts_per_tok": CHOSEN, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None, "use_cache": False,
    }  # fmt: skip
    if variant == "mixtral":
        return transformers.MixtralConfig(
            intermediate_size=40, num_local_experts=EXPERTS, sliding_window=None, **common
        )
    return transformers.Qwen3MoeConfig(
        intermediate_size=72, moe_intermediate_size=256 if wide else 40, num_experts=EXPERTS,
        norm_topk_prob=not variant.endswith("-unnormalised"), **common,
    )  # fmt: skip


def hf_model(variant: str, seed: int = 0) -> Any:
    """Random, with a router that is neither undecided nor certain."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        hf_config(variant), attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            elif "embed" in name:
                p.normal_(0, 0.5)
            else:
                p.normal_(0, (1.0 if name.endswith("mlp.gate.weight") else 0.6) / p.shape[-1] ** 0.5)
    return model.float().eval()


def make_folder(variant: str, folder: Path) -> Path:
    hf_model(variant).save_pretrained(folder)
    tiny.make_tokenizer().save(folder)
    return folder
