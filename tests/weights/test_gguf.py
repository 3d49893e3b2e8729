"""GGUF in: every tensor type as the gguf package dequantises it, and whole models with transformers' logits."""

from __future__ import annotations

import hashlib
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits, dequantize

from graftune.errors import GraftuneError
from graftune.weights.base import open_base
from graftune.weights.gguf_io import read_gguf
from tests.support import oracle, tiny
from tests.weights import tiny_gguf

ROWS = 5
PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32}


def file_of(path: Path, kind: GGMLQuantizationType, blocks: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", blocks, raw_dtype=kind)
    tiny_gguf.finish(writer)
    return path


@pytest.mark.parametrize("kind", list(_type_traits), ids=lambda kind: kind.name)
def test_every_type_is_dequantised_as_the_package_does(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    """Random blocks, so every code, scale and sign occurs; scales that are no numbers compare as such."""
    block, size = GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(kind.value)
    blocks = draw.integers(0, 256, (ROWS, 2 * size), dtype=np.uint8)
    tensor = read_gguf(file_of(tmp_path / "x.gguf", kind, blocks)).tensors["w"]
    assert tensor.shape == (ROWS, 2 * block) and tensor.nbytes == blocks.nbytes and tensor.dtype_name == kind.name
    with np.errstate(all="ignore"):
        want = torch.from_numpy(dequantize(blocks, kind).astype(np.float32))
        assert torch.equal(tensor.read(1, 4).nan_to_num(7), want[1:4].nan_to_num(7))
        ids = torch.tensor([4, 0, 0, 3])
        assert torch.equal(tensor.gather(ids).nan_to_num(7), want[ids].nan_to_num(7))
    assert want.unique().numel() > 4


@pytest.mark.parametrize("name", PLAIN)
def test_plain_types(name: str, tmp_path: Path) -> None:
    values = (np.random.default_rng(2).normal(size=(ROWS, 24)) * 50).astype(PLAIN[name])
    path = file_of(tmp_path / "x.gguf", GGMLQuantizationType[name], values)
    assert np.array_equal(read_gguf(path).tensors["w"].read(0, ROWS).numpy(), values.astype(np.float32))


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K", "I64"])
def test_types_that_nobody_can_dequantise_are_refused(name: str, tmp_path: Path) -> None:
    kind = GGMLQuantizationType[name]
    blocks = np.zeros((ROWS, 2 * GGML_QUANT_SIZES[kind][1]), np.uint8)
    with pytest.raises(GraftuneError, match=f"is {name}, which cannot be dequantised"):
        read_gguf(file_of(tmp_path / "x.gguf", kind, blocks))


MODELS = ("llama", "llama-untied", "llama-linear", "llama-yarn", "llama-llama3", "qwen2", "qwen3")


@pytest.mark.parametrize("base_dtype", ["fp32", "keep"])
@pytest.mark.parametrize("variant", MODELS)
def test_logits_equal_transformers(variant: str, base_dtype: str, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", variant)
    ours = oracle.ours(path, base_dtype=base_dtype, random_b=False)
    tokens = torch.randint(3, tiny.VOCAB, (90,)).tolist()
    with torch.no_grad():
        want = tiny.hf_model(variant)(torch.tensor([tokens])).logits[0]
    assert (ours.logits([tokens]) - want).abs().max() < 1e-4
    assert ours.base.spec.tied == (variant not in ("llama-untied", "qwen3"))


def test_rows_are_in_hugging_face_order(tmp_path: Path) -> None:
    """By whole reads, by pieces and by lookups; and the file does have another order."""
    base = open_base(str(tiny_gguf.write(tmp_path / "m.gguf")))
    state = tiny.hf_model("llama").state_dict()
    raw = read_gguf(tmp_path / "m.gguf").tensors["blk.1.attn_k.weight"]
    for name in ("q_proj", "k_proj"):
        want = state[f"model.layers.1.self_attn.{name}.weight"]
        source = base.tensors[f"layers.1.self_attn.{name}.weight"]
        assert torch.equal(source.read(0, len(want)), want) and torch.equal(source.read(3, 6), want[3:6])
        assert torch.equal(source.gather(torch.tensor([5, 1])), want[[5, 1]])
    assert not torch.equal(raw.read(0, 16), state["model.layers.1.self_attn.k_proj.weight"])
    for name, tensor in oracle.dequantised(base).items():
        assert torch.equal(tensor, state[name]), name


def test_rope_factors_are_applied(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", rope_freqs__weight=np.array([1, 2, 3, 4], np.float32))
    plain = tiny_gguf.write(tmp_path / "p.gguf")
    with_factors, without = (oracle.ours(p).decoder.ropes[0].frequencies for p in (path, plain))
    assert torch.allclose(with_factors * torch.tensor([1.0, 2.0, 3.0, 4.0]), without)


def test_training_leaves_the_file_alone(tmp_path: Path) -> None:
    from graftune.cli import main
    from tests.training.runs import write_data

    path, data = tiny_gguf.write(tmp_path / "m.gguf"), write_data(tmp_path / "d.jsonl")
    before = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns
    for dtype in ("keep", "fp32"):
        line = ["train", str(path), str(data), "--base-dtype", dtype, "--out", str(tmp_path / dtype), "--quiet"]
        assert main([*line, "--max-steps", "2", "--samples", "0", "--device", "cpu"]) == 0
    assert (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) == before
    for adapter in (tmp_path / "keep" / "adapter", tmp_path / "fp32" / "adapter"):
        assert str(path) in (adapter / "adapter_config.json").read_text()
        assert before[0] in (adapter / "graftune.json").read_text()
