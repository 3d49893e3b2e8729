"""The tiny models as GGUF files, written with the gguf package's writer the way llama.cpp's converter writes them.

This is the other direction of weights/gguf_io.py and is written from the format's description, so that the two can
disagree: Q and K rows of Llama are interleaved here, and frequencies become divisors in rope_freqs.weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers

from tests.support import tiny

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BLOCK = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write(path: Path, variant: str = "llama", *, metadata: dict[str, Any] | None = None, **changed: Any) -> Path:
    """`metadata` overrides keys (None leaves one out); `changed` replaces tensors by GGUF name (None: left out), with
    dots written as double underscores."""
    model = tiny.hf_model(variant)
    family, config = variant.split("-")[0], model.config
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensors[gguf_name(name)] = _interleaved(name, value, config) if family == "llama" else value.numpy()
    rope = _rope(model, variant, tensors)
    tensors |= {name.replace("__", "."): value for name, value in changed.items()}
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": 10000.0,
        **rope,
    }
    values = {f"{family}.{key}": value for key, value in keys.items()} | vocabulary() | (metadata or {})
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", family))
    for key, value in values.items():
        if value is not None:
            _add(writer, key, value)
    for name, value in tensors.items():
        if value is not None:
            writer.add_tensor(name, np.ascontiguousarray(value))
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{BLOCK[inner]}.{kind}"


def vocabulary() -> dict[str, Any]:
    """259 tokens: three control tokens, 255 bytes and one merge (the format has no empty arrays)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters.remove("\u00ff")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tiny.SPECIAL, *letters, "qz"],
        "tokenizer.ggml.token_type": [3] * len(tiny.SPECIAL) + [1] * 256,
        "tokenizer.ggml.merges": ["q z"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": tiny.TEMPLATE,
    }


def _interleaved(name: str, value: torch.Tensor, config: Any) -> np.ndarray[Any, Any]:
    """Rows (head, half, i) -> (head, i, half) for Q and K, so that rope can turn neighbours."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for projection, count in heads.items():
        if name.endswith(f"{projection}.weight"):
            halves = value.view(count, 2, config.head_dim // 2, -1)
            return halves.transpose(1, 2).reshape(value.shape).numpy()
    return value.numpy()


def _rope(model: Any, variant: str, tensors: dict[str, Any]) -> dict[str, Any]:
    kind = variant.partition("-")[2]
    if kind == "llama3":
        frequencies = model.model.rotary_emb.inv_freq
        width = 2 * len(frequencies)
        plain = 1.0 / 10000.0 ** (torch.arange(0, width, 2).float() / width)
        tensors["rope_freqs.weight"] = (plain / frequencies).numpy()
    if kind in ("linear", "yarn"):
        scaling = tiny.ROPE[kind]
        keys = {"rope.scaling.type": kind, "rope.scaling.factor": scaling["factor"]}
        if kind == "yarn":
            keys["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        return keys
    return {}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)
