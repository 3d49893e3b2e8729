"""Tiny random mixtures of experts: one layer of them (-small), wide enough for blocks of 256 values (-wide), or with
experts in MXFP4, as gpt-oss's makers store them (-mxfp4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from graftune.model.frozen.formats import mxfp4
from graftune.weights.gguf_quant import quantise
from tests.support import tiny
from tests.support.quantised import values_of

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
    "gpt_oss": (
        "GptOssConfig",
        {
            "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_local_experts": EXPERTS,
            "sliding_window": 6,  # sizes are whole blocks of 32
            # Of this theta, llama.cpp's truncation of YaRN's range changes nothing, which the model does not do.
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10766.0, "factor": 4.0, "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}  # fmt: skip
ROUTERS = ("router.proj.weight", "mlp.gate.weight", "feed_forward.gate.weight", "shared_expert_gate.weight")
VARIANT_OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_moe-unnormalised": {"norm_topk_prob": False},
    "qwen3_moe-wide": {"hidden_size": 256, "num_hidden_layers": 2, "moe_intermediate_size": 256},
    "gpt_oss-small-mxfp4": {"num_hidden_layers": 1},
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
VARIANTS = (*OLDER, *NEWER, "gpt_oss-mxfp4")
STACKS = ("experts.gate_up_proj", "experts.down_proj")


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
                own = {"gate_up_proj_bias": 2.0, "router.bias": 0.1} if variant == "gpt_oss" else {}
                p.normal_(0, next((size for end, size in own.items() if name.endswith(end)), 0.5))  # 2: clamped
            elif "conv1d" in name:
                p.normal_(0, 2.0)
            else:
                sure = name.endswith("sinks") or (variant.endswith("-mxfp4") and name.endswith("router.weight"))
                spread = 3.0 if sure else 1.0 if name.endswith((*ROUTERS, "router.weight")) else 0.6
                p.normal_(0, spread / p.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.2)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.2)
        for name, p in model.named_parameters() if variant.endswith("-mxfp4") else ():
            if name.endswith(STACKS):
                p.copy_(values_of(mxfp4_blocks(p), "MXFP4").view(len(p), -1, p.shape[1]).transpose(1, 2))
    return model.float().eval()


def mxfp4_blocks(stack: torch.Tensor) -> torch.Tensor:
    """A stack [E, in, out] of transformers as GGUF's blocks of [E out, in]."""
    return quantise(stack.transpose(1, 2).flatten(0, 1).float().cpu(), "MXFP4")


def make_folder(variant: str, folder: Path) -> Path:
    hf_model(variant).save_pretrained(folder)
    tiny.make_tokenizer().save(folder)
    if variant.endswith("-mxfp4"):
        file, config = folder / "model.safetensors", folder / "config.json"
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith(STACKS)]:
            stack = tensors.pop(name)
            codes, scales = mxfp4.to_folder(mxfp4_blocks(stack))
            tensors[f"{name}_blocks"] = codes.view(len(stack), stack.shape[2], -1, 16).contiguous()
            tensors[f"{name}_scales"] = scales.view(len(stack), stack.shape[2], -1).contiguous()
        save_file(tensors, file, {"format": "pt"})
        described = json.loads(config.read_text()) | {"quantization_config": mxfp4.QUANTISATION}
        config.write_text(json.dumps(described))
    return folder
