"""llama.cpp as the judge of tokenizers: a server on a GGUF file, asked over its /tokenize address."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest


class LlamaCpp:
    def __init__(self, path: Path):
        xllamacpp = pytest.importorskip("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup = 64, 1, False
        params.n_batch = params.n_ubatch = 64
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        self.server = xllamacpp.Server(params)

    def encode(self, text: str, *, special: bool = True, add_special: bool = False) -> list[int]:
        request = urllib.request.Request(
            self.server.listening_address + "/tokenize",
            json.dumps({"content": text, "add_special": add_special, "parse_special": special}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["tokens"]


def write_model(path: Path, metadata: Mapping[str, Any]) -> Path:
    """The smallest Llama that llama.cpp loads, with the vocabulary of `metadata`."""
    width, size = 32, len(metadata["tokenizer.ggml.tokens"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(metadata.get("general.name", "tokenizer test"))
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width)
    for key, value in metadata.items():
        if not key.startswith("tokenizer."):
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((size, width), np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((width, width), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
