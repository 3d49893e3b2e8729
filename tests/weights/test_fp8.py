"""FP8 checkpoints in: compressed-tensors' scales by tensor, row and block, fine-grained block scales, against the
formula written out and (fine-grained) against transformers, which dequantises the same folder itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graftune.errors import GraftuneError
from graftune.kernels import fp8
from graftune.model.frozen.fp8 import Fp8
from graftune.runtime import resolve
from graftune.weights.base import open_base
from graftune.weights.placement import choose_placement
from tests.support import oracle, tiny

LARGEST = torch.finfo(torch.float8_e4m3fn).max
GROUP = {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "channel"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP, "input_activations": GROUP}},
    "ignore": ["lm_head"],
}
FINE = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}


def blocked(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales [blocks down, blocks across], what they stand for), written out block by block."""
    down, across = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    codes, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(down, across)
    expected = torch.empty_like(weight)
    for i in range(down):
        for j in range(across):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[place].abs().max() / LARGEST
            codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            expected[place] = codes[place].float() * scales[i, j]
    return codes, scales, expected


KINDS: dict[str, Any] = {
    "tensor": (COMPRESSED, "weight_scale", lambda w: (10**6, 10**6), lambda s: s.view(1)),
    "row": (COMPRESSED, "weight_scale", lambda w: (1, 10**6), lambda s: s),
    "row in bf16": (COMPRESSED, "weight_scale", lambda w: (1, 10**6), lambda s: s.bfloat16()),
    "row, flat": (COMPRESSED, "weight_scale", lambda w: (1, 10**6), lambda s: s.view(-1)),
    "block": (FINE, "weight_scale_inv", lambda w: (16, 32), lambda s: s),
    "even block": (FINE | {"weight_block_size": [8, 8]}, "weight_scale_inv", lambda w: (8, 8), lambda s: s),
}


def make(folder: Path, source: Path, kind: str) -> dict[str, torch.Tensor]:
    """A checkpoint of that kind out of a plain folder; returns what its tensors stand for."""
    config, scale_name, block_of, stored = KINDS[kind]
    shutil.copytree(source, folder)
    tensors, expected = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = expected[name] = weight
            continue
        codes, scales, _ = blocked(weight, *block_of(weight))
        scales = stored(scales)
        expected[name] = codes.float() * spread(scales.float(), weight, *block_of(weight))
        tensors[name] = codes
        tensors[name.removesuffix("weight") + scale_name] = scales
        if config is COMPRESSED:
            tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor([0.5])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(values))
    return expected


def spread(scales: torch.Tensor, weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A scale for every value."""
    down, across = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    down_index = torch.arange(weight.shape[0]) // rows
    return scales.view(down, across)[down_index][:, torch.arange(weight.shape[1]) // columns]


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_logits(kind: str, tiny_folder: Any, tmp_path: Path) -> None:
    expected = make(tmp_path / "m", tiny_folder("qwen2"), kind)
    base = open_base(str(tmp_path / "m"))
    for name, value in expected.items():
        ours = base.tensors[name.removeprefix("model.")]
        assert torch.equal(ours.values().float(), value), name
        if value.dim() == 2:
            assert torch.equal(ours.read(3, 7).float(), value[3:7])
            ids = torch.tensor([len(value) - 1, 0, 2, 2])
            assert torch.equal(ours.gather(ids).float(), value[ids])
    assert "FP8" in base.describe()["stored_as"]
    model = tiny.hf_model("qwen2")
    model.load_state_dict(expected, strict=False)
    tokens = torch.randint(3, tiny.VOCAB, (40,)).tolist()
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0]
    for dtype in ("fp32", "keep"):
        got = oracle.ours(tmp_path / "m", base_dtype=dtype, random_b=False).logits([tokens])
        assert (got - want).abs().max() < 1e-4
    weight = base.tensors["layers.0.mlp.up_proj.weight"]
    assert weight.nbytes < 1.5 * 72 * 48 + 400  # a byte a value and the scales


@pytest.fixture
def wide_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Widths are multiples of 16; the reference computes FP8 on a CPU."""
    monkeypatch.setattr(fp8, "require", lambda device, compute: None)
    monkeypatch.setitem(tiny.VARIANT_OPTIONS, "llama-untied", {"intermediate_size": 96})
    return tiny.make_folder("llama-untied", tmp_path / "plain")


@pytest.mark.parametrize("kind", KINDS)
def test_an_fp8_base_keeps_codes_with_one_scale_for_a_row(kind: str, wide_folder: Path, tmp_path: Path) -> None:
    """Others are rounded again, which is said; either way values are near what the checkpoint means."""
    expected = make(tmp_path / "m", wide_folder, kind)
    keeps = "block" not in kind
    ours = oracle.ours(tmp_path / "m", base_dtype="fp8", random_b=False)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    for block in ours.decoder.blocks:
        names = [f"model.layers.{block.index}.self_attn.{p}_proj.weight" for p in "qkv"]
        weight = block.projections[0].frozen
        assert isinstance(weight, Fp8)
        codes = torch.cat([stored[name].view(torch.uint8) for name in names])
        assert torch.equal(weight.weight.view(torch.uint8), codes) is keeps
        values, exact = weight.weight.float() * weight.scale[:, None], torch.cat([expected[name] for name in names])
        assert torch.equal(values, exact) if keeps else (values - exact).norm() < 0.04 * exact.norm()
    placed = choose_placement(ours.base, "fp8", resolve("cpu", "fp32"), 0)
    assert ("block scales rounded again to row scales" in placed.why) is not keeps


def test_an_fp8_base_refuses_codes_that_are_no_numbers(wide_folder: Path, tmp_path: Path) -> None:
    make(tmp_path / "m", wide_folder, "row")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.uint8)[7, 5] = 0xFF
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    with pytest.raises(GraftuneError, match="holds numbers that are not finite"):
        oracle.ours(tmp_path / "m", base_dtype="fp8")


def test_transformers_reads_the_same(tiny_folder: Any, tmp_path: Path) -> None:
    import transformers

    make(tmp_path / "m", tiny_folder("llama"), "even block")  # others it refuses
    wish = transformers.FineGrainedFP8Config(weight_block_size=(8, 8), dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", quantization_config=wish, dtype=torch.float32
    )
    base = open_base(str(tmp_path / "m"))
    compared = 0
    for name, value in model.state_dict().items():
        ours = base.tensors.get(name.removeprefix("model."))
        if ours is not None and name.endswith("_proj.weight") and value.dtype == torch.float32:
            assert torch.allclose(ours.values(), value, rtol=1e-6, atol=0), name
            compared += 1
    assert compared == 21


def damaged(folder: Path, **changes: torch.Tensor | None) -> str:
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        tensors[f"model.layers.1.mlp.up_proj.{name}"] = value  # type: ignore[assignment]
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(GraftuneError) as caught:
        open_base(str(folder))
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_damaged_scales(tiny_folder: Any, tmp_path: Path) -> None:
    def fresh(kind: str = "row") -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        make(folder, tiny_folder("llama"), kind)
        return folder

    assert "up_proj.weight is FP8 and has 0 tensors of scales" in damaged(fresh(), weight_scale=None)
    assert "has 2 tensors of scales" in damaged(fresh(), weight_scale_inv=torch.ones(1))
    assert "its scales are [71, 1]" in damaged(fresh(), weight_scale=torch.ones(71, 1))
    assert "its scales are [5, 3]" in damaged(fresh("block"), weight_scale_inv=torch.ones(5, 3))
    assert "are not finite" in damaged(fresh(), weight_scale=torch.full((72, 1), torch.nan))
    assert "are I32" in damaged(fresh(), weight_scale=torch.ones(72, 1, dtype=torch.int32))
    assert "has the shape [3456]" in damaged(fresh(), weight=torch.zeros(3456, dtype=torch.float8_e4m3fn))
    assert "is F8_E5M2" in damaged(fresh(), weight=torch.zeros(72, 48, dtype=torch.float8_e5m2))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised checkpoint (gptq)"),
        ({"quant_method": "compressed-tensors"}, "quantised checkpoint (compressed-tensors)"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"type": "int"}}}}, "compressed"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "its blocks are [0, 128]"),
        ({"quant_method": "fp8", "weight_block_size": "all"}, "its blocks are 'all'"),
    ],
)
def test_other_configurations(told: dict[str, Any], said: str, tiny_folder: Any, tmp_path: Path) -> None:
    make(tmp_path / "m", tiny_folder("llama"), "block")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": told}))
    with pytest.raises(GraftuneError) as caught:
        open_base(str(tmp_path / "m"))
    assert said in str(caught.value)
