"""Bases that are missing, cut, damaged, lying, or of another kind than the program knows."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from graftune.errors import GraftuneError
from graftune.weights.gguf_io import read_gguf
from tests.bad_input.conftest import Refuse
from tests.weights import tiny_gguf


@pytest.fixture
def folder(tiny_folder, tmp_path: Path) -> Path:
    mine = tmp_path / "model"
    shutil.copytree(tiny_folder("llama"), mine)
    return mine


# Not a model


@pytest.mark.parametrize("name", ["missing.gguf", "./missing", "/nowhere/model", "~/no such model", "a/b/c"])
def test_no_such_base(name: str, data: Path, refuse: Refuse) -> None:
    assert f"{name}: no such file or folder" in refuse(name, data)


@pytest.mark.parametrize("content", [b"", b"GG", b"hello, I am a text file\n" * 50, b"PK\x03\x04" + bytes(100)])
def test_not_a_model(content: bytes, data: Path, tmp_path: Path, refuse: Refuse) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert str(path) in refuse(path, data)


def test_a_folder_without_a_model(data: Path, tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in refuse(tmp_path / "empty", data)


# GGUF


def header(*, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


LIES = {
    "version": header(version=99) + bytes(64),
    "tensor count": header(tensors=2**63) + bytes(64),
    "key count": header(keys=2**64 - 1) + bytes(64),
    "string length": header(keys=1) + struct.pack("<Q", 2**62) + bytes(64),
    "value type": header(keys=1) + text(b"k") + struct.pack("<I", 77) + bytes(64),
    "array length": header(keys=1) + text(b"k") + struct.pack("<IIQ", 9, 4, 2**40) + bytes(64),
    "array of strings": header(keys=1) + text(b"k") + struct.pack("<IIQ", 9, 8, 2**61) + bytes(64),
    "nested arrays": header(keys=1) + text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50 + bytes(64),
    "alignment": header(keys=1) + text(b"general.alignment") + struct.pack("<II", 4, 3) + bytes(64),
    "huge alignment": header(tensors=1, keys=1) + text(b"general.alignment") + struct.pack("<II", 4, 2**31)
    + tensor(b"w", (4, 4), 0, 0) + bytes(64),
    "dimensions": header(tensors=1) + text(b"w") + struct.pack("<I", 2**31) + bytes(64),
    "no dimension": header(tensors=1) + text(b"w") + struct.pack("<I", 0) + bytes(64),
    "zero rows": header(tensors=1) + tensor(b"w", (4, 0), 0, 0) + bytes(64),
    "shape that wraps around": header(tensors=1) + tensor(b"w", (32, 2**32, 2**32, 2**31), 0, 0) + bytes(64),
    "shape that wraps to negative": header(tensors=1) + tensor(b"w", (32, 2**32, 2**31), 0, 0) + bytes(64),
    "tensor type": header(tensors=1) + tensor(b"w", (4, 4), 250, 0) + bytes(64),
    "removed tensor type": header(tensors=1) + tensor(b"w", (4, 4), 4, 0) + bytes(64),
    "offset": header(tensors=1) + tensor(b"w", (4, 4), 0, 2**63) + bytes(64),
    "offset near the end": header(tensors=1) + tensor(b"w", (4, 4), 0, 64) + bytes(96),
    "part of a block": header(tensors=1) + tensor(b"w", (31, 2), 2, 0) + bytes(200),
    "same name twice": header(tensors=2) + tensor(b"w", (2, 2), 0, 0) * 2 + bytes(200),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_gguf_header(lie: str, data: Path, tmp_path: Path, refuse: Refuse) -> None:
    path = tmp_path / "lie.gguf"
    path.write_bytes(LIES[lie])
    with pytest.raises(GraftuneError):
        read_gguf(path)
    assert str(path) in refuse(path, data)


METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": ({"general.architecture": "mamba"}, "architecture 'mamba' has Mamba layers"),
    "no width": ({"llama.embedding_length": None}, "llama.embedding_length is None"),
    "text for a number": ({"llama.block_count": "three"}, "llama.block_count is 'three'"),
    "text for theta": ({"llama.rope.freq_base": "much"}, "makes no sense"),
    "more layers than there are": ({"llama.block_count": 2**12}, "tensor layers.3."),
    "far more layers": ({"llama.block_count": 2**31}, "says 2147483648 layers"),
    "width": ({"llama.embedding_length": 2**31}, "tensor embed_tokens.weight is [259, 48]"),
    "head width": ({"llama.attention.key_length": 2**30}, "tensor layers.0.self_attn.q_proj.weight is [48, 48]"),
    "odd heads": ({"llama.attention.key_length": 7}, "makes no sense (head width)"),
    "no key heads": ({"llama.attention.head_count_kv": 0}, "do not divide by 0 key heads"),
    "key heads a layer": ({"llama.attention.head_count_kv": [2, 2, 2]}, "makes no sense"),
    "key heads": ({"llama.attention.head_count_kv": 4}, "6 heads do not divide by 4 key heads"),
    "rope": ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not known"),
    "rope factor": ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "makes no sense"),
    "experts": ({"llama.expert_count": 8, "llama.expert_used_count": 2}, "mlp.gate.weight is missing"),
    "experts without a choice": ({"llama.expert_count": 8}, "expert_used_count is None"),
    "more chosen than there are": ({"llama.expert_count": 2, "llama.expert_used_count": 3}, "3 of 2 experts"),
    "vocabulary kind": ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
    "no vocabulary": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
}


@pytest.mark.parametrize("case", METADATA)
def test_gguf_metadata(case: str, data: Path, tmp_path: Path, refuse: Refuse) -> None:
    metadata, expected = METADATA[case]
    assert expected in refuse(tiny_gguf.write(tmp_path / "m.gguf", metadata=metadata), data)


def test_gguf_tensors(data: Path, tmp_path: Path, refuse: Refuse) -> None:
    def of(**changed: Any) -> str:
        return refuse(tiny_gguf.write(tmp_path / "m.gguf", **changed), data)

    assert "tensor layers.1.mlp.up_proj.weight is missing" in of(blk__1__ffn_up__weight=None)
    wrong = of(blk__1__ffn_up__weight=np.zeros((72, 47), np.float32))
    assert "tensor layers.1.mlp.up_proj.weight is [72, 47] where the configuration says [72, 48]" in wrong
    assert "no token_embd.weight" in of(token_embd__weight=None)
    assert "rope_freqs.weight is [9]" in of(rope_freqs__weight=np.ones(9, np.float32))
    assert "q_proj.weight is [40, 48]" in of(blk__0__attn_q__weight=np.zeros((40, 48), np.float32))
    small = of(token_embd__weight=np.zeros((200, 48), np.float32))
    assert "the tokenizer has 259 tokens and the embedding 200 rows" in small


# Folders


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "\udcff", "{" * 100_000, '{"a": ' * 50_000])
def test_a_broken_configuration(content: str, folder: Path, data: Path, refuse: Refuse) -> None:
    (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    assert "config.json: is not" in refuse(folder, data)


CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": ({"model_type": "mamba"}, "architecture 'mamba' has Mamba layers"),
    "no architecture": ({"model_type": None}, "is not known"),
    "text for a number": ({"hidden_size": "48"}, "hidden_size is '48'"),
    "negative": ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    "text for eps": ({"rms_norm_eps": "small"}, "makes no sense"),
    "list for rope": ({"rope_parameters": [1]}, "makes no sense"),
    "rope": ({"rope_parameters": {"rope_type": "dynamic-other"}}, "rope scaling 'dynamic-other'"),
    "more layers": ({"num_hidden_layers": 10**9}, "says 1000000000 layers"),
    "width": ({"hidden_size": 10**9}, "tensor embed_tokens.weight"),
    "heads": ({"num_attention_heads": 5}, "5 heads do not divide by 2 key heads"),
    "vocabulary": ({"vocab_size": 300}, "tensor embed_tokens.weight is [259, 48]"),
    "small vocabulary": ({"vocab_size": 100}, "the tokenizer has 259 tokens and the embedding 100 rows"),
    "untied without a head": ({"tie_word_embeddings": False}, "tensor lm_head.weight is missing"),
    "quantised": ({"quantization_config": {"bits": 4}}, "is a quantised checkpoint"),
    "activation": ({"hidden_act": "gelu"}, "activation 'gelu' is not known"),
    "bias": ({"attention_bias": True}, "attention_bias is set"),
}


@pytest.mark.parametrize("case", CONFIG)
def test_configurations(case: str, folder: Path, data: Path, refuse: Refuse) -> None:
    changes, expected = CONFIG[case]
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(values))
    assert expected in refuse(folder, data)


def test_weights_of_another_model(folder: Path, data: Path, refuse: Refuse) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.self_attn.v_proj.weight"] = torch.zeros(16, 47)
    save_file(tensors, path, {"format": "pt"})
    assert "layers.2.self_attn.v_proj.weight is [16, 47]" in refuse(folder, data)
    del tensors["model.layers.2.self_attn.v_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    assert "tensor layers.2.self_attn.v_proj.weight is missing" in refuse(folder, data)
    path.unlink()
    assert "holds no model.safetensors" in refuse(folder, data)


def test_no_tokenizer(folder: Path, data: Path, refuse: Refuse) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert "the file is not a tokenizer" in refuse(folder, data)
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refuse(folder, data)


# Devices


def test_devices(folder: Path, data: Path, refuse: Refuse) -> None:
    assert "use auto, cpu, cuda" in refuse(folder, data, "--device", "abacus")
