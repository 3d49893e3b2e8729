"""A Llama-shaped folder of bf16 shards of a given size, and a decoder loaded from one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from graftune.model.decoder import Decoder
from graftune.model.lora import build_arena
from graftune.runtime import resolve
from graftune.settings.sections import LoraConfig
from graftune.weights.base import open_base
from graftune.weights.load import build_decoder
from graftune.weights.placement import Placement
from tests.support.tiny import make_tokenizer

CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}


def make_folder(folder: Path, gib: float) -> None:
    """Shards, a layer or more each, until there are so many bytes."""
    width, ffn, kv = 2048, 8192, 512
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (ffn, width),
        "mlp.up_proj": (ffn, width),
        "mlp.down_proj": (width, ffn),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    a_layer = 2 * sum(torch.Size(shape).numel() for shape in shapes.values())
    layers = max(1, round(gib * 2**30 / a_layer))
    where: dict[str, str] = {}
    for number in range(0, layers, 4):
        tensors = {
            f"model.layers.{i}.{name}.weight": torch.randn(shape).mul_(0.02).bfloat16()
            for i in range(number, min(number + 4, layers))
            for name, shape in shapes.items()
        }
        if number == 0:
            tensors["model.embed_tokens.weight"] = torch.randn(32000, width).mul_(0.02).bfloat16()
            tensors["model.norm.weight"] = torch.ones(width).bfloat16()
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    make_tokenizer().save(folder)


def load(path: str, base_dtype: str) -> Decoder:
    base, runtime, lora = open_base(path), resolve("cpu"), LoraConfig(rank=8)
    arena = build_arena(base.spec, lora, runtime.device, runtime.compute)
    return build_decoder(base, arena, lora, runtime, Placement(base_dtype, "measured"))
