"""Tiny models to export: with a merge in their vocabulary (GGUF readers refuse one without), and one that is wide
enough for blocks of 256 values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.support import tiny


def tokenizer(names: tuple[str, ...] = ()) -> Any:
    """tiny.py's, with the pair qz in the place of the last byte, and names in those of the bytes before it."""
    import dataclasses

    import tokenizers

    made = tiny.make_tokenizer()
    values = json.loads(made.backend.to_str())
    vocabulary = values["model"]["vocab"]
    vocabulary["qz"] = vocabulary.pop(max(vocabulary, key=vocabulary.__getitem__))
    for name in names:
        last = max((t for t in vocabulary if t != "qz" and t not in names), key=vocabulary.__getitem__)
        vocabulary[name] = vocabulary.pop(last)
    values["model"]["merges"] = [["q", "z"]]
    return dataclasses.replace(made, backend=tokenizers.Tokenizer.from_str(json.dumps(values)))


def make_folder(variant: str, folder: Path) -> Path:
    tiny.make_folder(variant, folder)
    # llama.cpp asks the vocabulary of every phi3 for these by name.
    tokenizer(("<s>", "</s>", "<unk>") if variant.startswith("phi3") else ()).save(folder)
    return folder


def make_wide(folder: Path, layers: int = 9, width: int = 256, tied: bool = True) -> Path:
    import transformers

    options: dict[str, Any] = {
        "vocab_size": tiny.VOCAB, "hidden_size": width, "intermediate_size": 512, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256,
        "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            else:
                p.normal_(0, 0.6 / p.shape[-1] ** 0.5 if "embed" not in name else 0.1)
    model.float().save_pretrained(folder)
    tokenizer().save(folder)
    return folder
