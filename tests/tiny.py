"""Tiny random models with real structure: every family, GQA, odd widths, norms and biases that are not 1 and 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 256 + len(SPECIAL)
ROPE: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VARIANTS = (*FAMILIES, "llama-linear", "llama-llama3", "llama-yarn", "llama-untied", "mistral-window")


def hf_config(variant: str) -> Any:
    import transformers

    family, _, extra = variant.partition("-")
    kinds = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
    options: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16 if family == "qwen3" else 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": extra != "untied" and family in ("llama", "qwen2"),
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": None,
        "use_cache": False,
    }
    if extra in ROPE:
        options["rope_parameters"] = {"rope_theta": 10000.0, **ROPE[extra]}
    if family == "mistral":
        options["sliding_window"] = 5 if extra == "window" else None
    return getattr(transformers, kinds[family])(**options)


def hf_model(variant: str, seed: int = 0) -> Any:
    """Random, but not nearly linear: weights wide enough that attention and gates saturate here and there."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(variant), attn_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                p.normal_(0, 0.5)
            else:
                p.normal_(0, 0.6 / p.shape[-1] ** 0.5 if "embed" not in name else 0.5)
    return model.float().eval()


def make_folder(variant: str, folder: Path) -> Path:
    model = hf_model(variant)
    model.save_pretrained(folder)
    make_tokenizer().save(folder)
    return folder


def make_tokenizer() -> Any:
    """Bytes as tokens, a ChatML template, three special tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from graftune.tokenizer import ChatTemplate, Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(
        backend=backend,
        bos_id=None,
        eos_id=2,
        pad_id=0,
        add_bos=False,
        add_eos=False,
        template=ChatTemplate(TEMPLATE, eos_token=SPECIAL[2]),
        stop_ids=(0, 2),
    )
