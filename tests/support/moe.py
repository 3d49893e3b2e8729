"""Tiny random mixtures of experts: one layer of them (-small), or wide enough for blocks of 256 values (-wide)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support import tiny

EXPERTS, CHOSEN = 6, 3
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4, "num_experts": EXPERTS, "moe_intermediate_size": 40,  # the last one has attention
    "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "rms_norm_eps": 1e-3,
}  # fmt: skip
# The class of the configuration in transformers, and its options beside those of all.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", {"moe_intermediate_size": 40, "num_experts": EXPERTS, "norm_topk_prob": True}),
    "mixtral": ("MixtralConfig", {"intermediate_size": 40, "num_local_experts": EXPERTS, "sliding_window": None}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", DELTA),
    "qwen3_next": ("Qwen3NextConfig", DELTA),
    "olmoe": (
        "OlmoeConfig",
        {"intermediate_size": 40, "num_experts": EXPERTS, "num_key_value_heads": 6, "head_dim": None},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "moe_intermediate_size": 40,
            "num_experts": EXPERTS, "head_dim": None, "pad_token_id": 0,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "moe_intermediate_size": 40, "n_routed_experts": EXPERTS, "n_shared_experts": 2, "attention_bias": True,
            "use_qk_norm": True, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        tiny.GEMMA4
        | {
            "enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": CHOSEN, "moe_intermediate_size": 40,
            "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        },
    ),
}  # fmt: skip
ROUTERS = ("router.proj.weight", "mlp.gate.weight", "feed_forward.gate.weight", "shared_expert_gate.weight")
VARIANT_OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_moe-unnormalised": {"norm_topk_prob": False},
    "qwen3_moe-wide": {"hidden_size": 256, "num_hidden_layers": 2, "moe_intermediate_size": 256},
    "qwen3_moe-small": {"num_hidden_layers": 1},
    "qwen3_next-small": {  # rows of whole blocks of 32 values
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}
OLDER = ("qwen3_moe", "qwen3_moe-unnormalised", "mixtral")
NEWER = tuple(family for family in FAMILIES if family not in OLDER)
VARIANTS = (*OLDER, *NEWER)


def hf_config(variant: str) -> Any:
    import transformers

    common: dict[str, Any] = {
        "vocab_size": tiny.VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 6,
        "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "tie_word_embeddings": False, "num_experts_per_tok": CHOSEN, "bos_token_id": 0, "eos_token_id": 2,
        "pad_token_id": None, "use_cache": False,
    }  # fmt: skip
    kind, options = FAMILIES[variant.partition("-")[0]]
    options = common | options | VARIANT_OPTIONS.get(variant, {})
    options = {name: value for name, value in options.items() if (name, value) != ("head_dim", None)}
    return getattr(transformers, kind)(**options)


def hf_model(variant: str, seed: int = 0) -> Any:
    """Random, with a router that is neither undecided nor certain."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        hf_config(variant), attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("scale"):
                p.uniform_(0.5, 1.5)
                if name.endswith("router.scale"):
                    p.mul_(p.shape[0] ** 0.5)  # the input is divided by this
                if variant.startswith(("qwen3_5_moe", "qwen3_next")) and "linear_attn" not in name:
                    p.sub_(1.0)  # theirs is the weight less one
            elif "embed" in name or name.endswith("bias"):
                p.normal_(0, 0.5)
            elif "conv1d" in name:
                p.normal_(0, 2.0)
            else:
                router = name.endswith(ROUTERS)
                p.normal_(0, (1.0 if router else 0.6) / p.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.2)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.2)
    return model.float().eval()


def make_folder(variant: str, folder: Path) -> Path:
    hf_model(variant).save_pretrained(folder)
    tiny.make_tokenizer().save(folder)
    return folder
