"""Numbers of a base that are not finite are found while it is loaded, and the tensor is named."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graftune.errors import GraftuneError
from graftune.kernels.gguf_dequant import KINDS, scales
from graftune.kernels.gguf_dequant.reference import PLAIN, SCALES
from graftune.model.frozen import Scratch, Table, Unpacked
from graftune.model.frozen.formats.floats import FloatRows
from graftune.model.frozen.formats.gguf import GgufRows
from graftune.model.frozen.interface import TensorRows
from graftune.settings.sections import LoraConfig
from graftune.weights import finite
from graftune.weights.base import open_base
from tests.support import oracle, quantised

LORA = LoraConfig(rank=2, alpha=4.0)


def spoilt(folder: Path, out: Path, name: str, value: float) -> Path:
    """A copy of the model with one number in a tensor."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.parametrize("held", ["fp32", "keep", "nf4"])
@pytest.mark.parametrize("name", ["layers.0.self_attn.k_proj.weight", "layers.0.mlp.down_proj.weight", "norm.weight"])
def test_a_tensor_that_is_not_finite_is_named(held: str, name: str, tiny_folder, tmp_path: Path) -> None:
    bad = spoilt(tiny_folder("llama-shallow"), tmp_path / "bad", f"model.{name}", float("nan"))
    with pytest.raises(GraftuneError) as said:
        oracle.place(open_base(str(bad)), LORA, held)
    assert str(said.value) == f"{bad}: tensor {name} holds numbers that are not finite; download the model again"


LORA_AND_NORMS = LoraConfig(rank=2, alpha=4.0, train_norms=True)


@pytest.mark.parametrize(
    ("family", "name", "lora"),
    [
        ("llama-untied", "model.embed_tokens.weight", LORA),
        ("llama-untied", "lm_head.weight", LORA),
        ("llama-shallow", "model.norm.weight", LORA_AND_NORMS),  # trains
        ("lfm2-short", "model.layers.0.conv.conv.weight", LORA),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias", LORA),
    ],
)
def test_no_kind_of_tensor_is_left_out(family: str, name: str, lora: LoraConfig, tiny_folder, tmp_path: Path) -> None:
    bad = spoilt(tiny_folder(family), tmp_path / "bad", name, float("inf"))
    with pytest.raises(GraftuneError, match=r"tensor \S+ holds numbers that are not finite"):
        oracle.place(open_base(str(bad)), lora)


def test_what_a_gpu_holds_is_looked_at(tiny_folder, tmp_path: Path) -> None:
    """Blocks and floats that products unpack."""
    blocks = quantised.random_blocks("Q4_K", 4, KINDS["Q4_K"].values, 1.0, 3)
    good, bad = GgufRows(blocks, "Q4_K", KINDS["Q4_K"].values), GgufRows(blocks.clone(), "Q4_K", KINDS["Q4_K"].values)
    bad.blocks[2, :2] = torch.tensor([float("inf")], dtype=torch.float16).view(torch.uint8)
    scratch = Scratch(1 << 14, torch.device("cpu"), torch.float32)
    base = open_base(str(spoilt(tiny_folder("llama-shallow"), tmp_path / "bad", "model.norm.weight", math.nan)))
    finite.check_loaded([Unpacked([good, good], scratch)], base)
    for spoilt_one in (Unpacked([good, bad], scratch), Table(bad, scratch), FloatRows(torch.full((2, 2), math.nan))):
        with pytest.raises(GraftuneError, match=r"norm\.weight holds numbers"):
            finite.check_loaded([Unpacked([good], scratch), spoilt_one], base)


def test_numbers_beyond_a_dtype_are_no_fault_of_the_file(tiny_folder, tmp_path: Path) -> None:
    name = "layers.0.mlp.up_proj.weight"
    wide = spoilt(tiny_folder("llama-shallow"), tmp_path / "wide", f"model.{name}", 1e5)
    oracle.place(open_base(str(wide)), LORA, "fp32")
    with pytest.raises(GraftuneError, match="its weights hold numbers beyond the range of float16; set base_dtype"):
        oracle.place(open_base(str(wide)), LORA, "fp16")
    huge = TensorRows(torch.full((2, 8), 3e38))  # whose sum overflows
    assert finite.is_finite(huge.tensor) and not finite.is_finite(huge.tensor * 2)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PLAIN])
def test_blocks_are_finite_where_their_scales_are(kind: str) -> None:
    """For every place of a scale: nothing else in a block can make a value that is not finite."""
    width = KINDS[kind].values
    blocks = quantised.random_blocks(kind, 64, width, 1.0, 3)
    assert quantised.values_of(blocks, kind).isfinite().all()
    blocks[5, 1:] |= 119 if kind == "MXFP4" else 0  # the largest codes
    infinite = torch.tensor([float("inf")], dtype=torch.float16).view(torch.uint8)
    for at in SCALES.get(kind, (0,)):
        bad = blocks.clone()
        if kind == "MXFP4":  # an exponent
            bad[5, 0], bad[6, 0] = 253, 252
        else:
            bad[5, at : at + 2] = infinite
        values = quantised.values_of(bad, kind)
        assert scales(blocks, kind).isfinite().all() and not scales(bad, kind).isfinite().all()
        assert not values[5].isfinite().all() and values[[4, 6]].isfinite().all()


def test_a_scale_of_a_gguf_that_is_not_finite_is_named() -> None:
    base = quantised.gguf_base("Q4_K", quantised.spec(256, layers=1), mixed="Q6_K")
    quantised.placed(base, LORA, "keep")
    tensor: Any = base.tensors["layers.0.self_attn.v_proj.weight"]
    tensor.blocks[7, 208:210] = torch.tensor([float("nan")], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(GraftuneError, match=r"blocks: tensor layers\.0\.self_attn\.v_proj\.weight holds numbers that"):
        quantised.placed(base, LORA, "keep")
