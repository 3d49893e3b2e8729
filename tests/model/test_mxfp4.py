"""MXFP4 in folders and GGUFs: the values are those of transformers and of the gguf package, to the bit, and either
layout becomes the other without losing one. Weights of one kind are packed into one member."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from graftune.errors import GraftuneError
from graftune.model.frozen.formats import FORMATS, assembled, check_quantisation, checkpoint_format, stored_format
from graftune.model.frozen.formats.mxfp4 import Mxfp4Tensor, to_folder, to_gguf
from graftune.model.frozen.interface import TensorRows
from graftune.weights.placement import choose_placement
from tests.support import quantised

EXPERTS, OUT, BLOCKS = 3, 6, 2


class Bytes(TensorRows):
    @property
    def dtype_name(self) -> str:
        return "U8"


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of all bytes, and exponents over the range in which bf16 has normal numbers."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(3)[: EXPERTS * OUT * BLOCKS * 16]
    scales = torch.randint(4, 250, (EXPERTS, OUT, BLOCKS), dtype=torch.uint8)
    return codes.view(EXPERTS, OUT, BLOCKS, 16), scales


def tensor() -> Mxfp4Tensor:
    codes, scales = drawn()
    return Mxfp4Tensor(Bytes(codes), Bytes(scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_are_those_of_transformers_and_of_the_gguf_package(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    ours = tensor()
    theirs = convert_moe_packed_tensors(ours.codes.values(), ours.scales.values(), dtype=dtype)  # [E, in, out]
    assert torch.equal(ours.values().to(dtype), theirs.transpose(1, 2))
    package = dequantize(ours.raw(0, EXPERTS).numpy(), GGMLQuantizationType.MXFP4)
    assert torch.equal(ours.values().flatten(0, 1), torch.from_numpy(package))
    assert torch.equal(ours.read(1, 2), ours.values()[1:2]) and ours.shape == (EXPERTS, OUT, 32 * BLOCKS)


def test_each_layout_becomes_the_other_without_losing_a_bit() -> None:
    codes, scales = (each.flatten(0, 1) for each in drawn())
    blocks = to_gguf(codes, scales)
    assert blocks.shape == (EXPERTS * OUT, 17 * BLOCKS) and not torch.equal(blocks.view(-1, BLOCKS, 17)[..., 1:], codes)
    for got, want in zip(to_folder(blocks), (codes, scales), strict=True):
        assert torch.equal(got, want)
    other = torch.randint(256, (5, 34), dtype=torch.uint8)
    assert torch.equal(to_gguf(*to_folder(other)), other)


def test_a_folder_is_put_together() -> None:
    made = tensor()
    stored = {"x.gate_up_proj_blocks": made.codes, "x.gate_up_proj_scales": made.scales}
    found = assembled(stored | {"x.gate_up_proj_bias": TensorRows(torch.ones(3, 6))}, Path("folder"))
    assert set(found) == {"x.gate_up_proj", "x.gate_up_proj_bias"}
    assert stored_format(found["x.gate_up_proj"]) is FORMATS["mxfp4"] is checkpoint_format(found)
    check_quantisation({"quant_method": "mxfp4", "modules_to_not_convert": []}, "folder")
    with pytest.raises(GraftuneError, match=r"_blocks is .* and its scales are"):
        assembled(stored | {"x.gate_up_proj_scales": Bytes(torch.ones(3, 6, 1).byte())}, Path("folder"))
    with pytest.raises(GraftuneError, match="is U8"):
        assembled({"x.gate_up_proj_blocks": made.codes}, Path("folder"))


def test_members_of_one_kind_are_dequantised_together() -> None:
    sources = [
        quantised.Blocks(kind, (rows, 64), quantised.random_blocks(kind, rows, 64, 0.1, rows))
        for kind, rows in (("MXFP4", 3), ("MXFP4", 5), ("Q8_0", 4))
    ]
    packed = FORMATS["mxfp4"].pack_all(sources, torch.device("cpu"))
    assert [(each.dtype_name, each.shape) for each in packed] == [("MXFP4", (8, 64)), ("Q8_0", (4, 64))]
    assert torch.equal(torch.cat([each.values() for each in packed]), torch.cat([each.values() for each in sources]))


def test_auto_keeps_it() -> None:
    from graftune.runtime import resolve

    base = quantised.gguf_base("MXFP4", quantised.spec())
    found = choose_placement(base, "auto", resolve("cpu", "fp32"))
    assert (found.base_dtype, found.why) == ("keep", "as the checkpoint has it")
