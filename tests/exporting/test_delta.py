"""Gated delta nets in GGUFs, whose value heads lie in another order than in folders: adapters and models go both ways,
over quantised blocks too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graftune.api import export
from graftune.errors import GraftuneError
from graftune.model.mixers.gated_delta import GatedDelta
from graftune.weights.base import open_base
from graftune.weights.gguf_io import read_gguf
from tests.exporting import models
from tests.exporting.judges import DOCUMENT, LlamaCpp, gap, in_transformers, opened, ours, shaken
from tests.support import tiny

# Rows of whole blocks of 256 values; four value heads for each key head.
WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4, "linear_num_value_heads": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.VARIANT_OPTIONS, "qwen3_5-wide", WIDE)
        return models.make_folder("qwen3_5-wide", tmp_path_factory.mktemp("wide") / "model")


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "blocks"), [("F32", "F32"), ("Q8_0", "Q8_0"), ("Q4_K_M", "Q4_K")])
def test_a_gguf_is_tuned_as_it_is_and_goes_out_as_a_folder(kind: str, blocks: str, wide: Path, tmp_path: Path) -> None:
    base = export(str(wide), "gguf", kind=kind, out=str(tmp_path / "base.gguf")).path
    file = read_gguf(base)
    assert file.tensors["blk.0.ssm_out.weight"].dtype_name == file.tensors["blk.0.ssm_beta.weight"].dtype_name == blocks
    assert file.tensors["blk.0.ssm_conv1d.weight"].dtype_name == "F32", "llama.cpp reads no other"
    run = shaken(opened(base, rank=4, alpha=8.0, base_dtype="keep"), by=0.05)
    mixer = run.parts.decoder.blocks[0].mixer
    assert isinstance(mixer, GatedDelta) and mixer.spec.tiled
    want, plain = ours(run), ours(run, adapted=False)
    assert gap(want, plain) > 0.1
    adapter = run.save(tmp_path / "adapter")
    assert gap(ours(opened(base, adapter, base_dtype="keep")), want) == 0.0, "it comes back to the tiled base"
    whole = export(str(base), "merged", kind="F32", out=str(tmp_path / "whole")).path
    merged = export(str(adapter), "merged", kind="F32", out=str(tmp_path / "merged")).path
    lora = export(str(adapter), "gguf-lora", out=str(tmp_path / "lora.gguf")).path
    again = export(str(adapter), "gguf", kind="F32", out=str(tmp_path / "again.gguf")).path
    gaps = {
        "the base as a folder": gap(in_transformers(whole), plain),
        "merged": gap(in_transformers(merged), want),
        "PEFT over the folder": gap(in_transformers(whole, adapter=adapter), want),
        "the adapter over the folder": gap(ours(opened(whole, adapter, any_base=True)), want),
        "its GGUF over the folder": gap(ours(opened(whole, lora, any_base=True)), want),
        "as a GGUF again": gap(ours(opened(again)), want),
    }
    assert max(gaps.values()) < 1e-4, gaps
    coarse = {"F32": 2e-3, "Q8_0": 0.3, "Q4_K_M": 0.4}[kind]  # llama.cpp's activations have 8 bits over such blocks
    assert gap(LlamaCpp(base, [lora]).along(DOCUMENT), want) < coarse
    assert gap(LlamaCpp(again).along(DOCUMENT), want) < 2e-3
    if kind == "F32":  # nothing is rounded: what the adapter does not change is the base's, to the bit
        stored = read_gguf(again).tensors
        for name in ("blk.0.ssm_a", "blk.0.ssm_dt.bias", "blk.0.ssm_norm.weight", "blk.0.ssm_conv1d.weight"):
            assert torch.equal(stored[name].values(), file.tensors[name].values()), name


def test_a_hundred_positions_of_llama_cpp_are_ours(tmp_path: Path) -> None:
    folder = models.make_folder("qwen3_5", tmp_path / "model")
    gguf = export(str(folder), "gguf", kind="F32", out=str(tmp_path / "m.gguf")).path
    document = [3 + (i * 37 + i * i % 11) % 250 for i in range(100)]
    got, want = LlamaCpp(gguf).along(document), ours(opened(folder), document)
    assert gap(got, want) < 1e-2 and torch.equal(got.argmax(1), want.argmax(1))


def test_layers_that_a_gguf_cannot_say_are_refused(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.VARIANT_OPTIONS, "qwen3_5-odd", {"num_hidden_layers": 3, "layer_types": kinds})
        folder = models.make_folder("qwen3_5-odd", tmp_path / "model")
    assert [layer.mixer.module for layer in open_base(str(folder)).spec.layers][1:] == ["linear_attn"] * 2
    with pytest.raises(GraftuneError, match="attention in every n-th layer"):
        export(str(folder), "gguf", kind="F32", out=str(tmp_path / "m.gguf"))
