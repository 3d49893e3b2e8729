"""GGUF blocks by the kernels, against the gguf package to the bit: every kind, rows of one block and of more than a
tile, whatever lies beside what is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftune.kernels import gguf_dequant
from graftune.kernels.gguf_dequant import KINDS
from tests.parity.test_gguf_dequant import DTYPES, SCALES, drawn, poisoned, same, untouched, wanted

# Whole numbers of tiles would hide a wrong mask: 4096 values are 128 small blocks, or 16 large ones.
SIZES = [(1, 1), (5, 1), (7, 3), (1, 17), (2, 67)]

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of fp16, meant


def rounded(want: torch.Tensor, dtype: torch.dtype, device: str) -> torch.Tensor:
    if dtype == torch.bfloat16 and device == "cpu":
        # Triton's interpreter cuts bf16 off instead of rounding it.
        return (want.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return want.to(dtype)


def in_normal_range(blocks: torch.Tensor, kind: str, device: str) -> torch.Tensor:
    """Triton's interpreter also gets bf16 numbers wrong that are not normal, which only MXFP4 has."""
    if kind == "MXFP4" and device == "cpu":
        blocks.view(-1, KINDS[kind].bytes)[:, 0].clamp_(min=3)
    return blocks


def check(blocks: torch.Tensor, kind: str, dtype: torch.dtype, padding: int, device: str) -> None:
    want = rounded(wanted(blocks, kind), dtype, device)
    wide, out = poisoned(*want.shape, padding, dtype, device)
    given = blocks.to(device)
    gguf_dequant.dequantise(given, kind, out)
    assert same(out.cpu(), want) and untouched(wide, out) and torch.equal(given.cpu(), blocks)


@pytest.mark.parametrize(("rows", "per_row"), SIZES)
@pytest.mark.parametrize("kind", SCALES)
def test_fp32(kernels_on: None, device: str, kind: str, rows: int, per_row: int) -> None:
    check(drawn(kind, rows, per_row, seed=per_row), kind, torch.float32, 0, device)


@pytest.mark.parametrize(("dtype", "padding"), [(torch.bfloat16, 0), (torch.bfloat16, 6), (torch.float16, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_into_rows_that_lie_apart(
    kernels_on: None, device: str, kind: str, dtype: torch.dtype, padding: int
) -> None:
    check(in_normal_range(drawn(kind, 9, 2, seed=padding), kind, device), kind, dtype, padding, device)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_gather(kernels_on: None, device: str, kind: str, index: torch.dtype) -> None:
    blocks = in_normal_range(drawn(kind, 13, 3, seed=5), kind, device)
    ids = torch.tensor([12, 0, 0, 7, 3, 12, 1], dtype=index)
    want = wanted(blocks, kind)[ids.long()]
    for dtype in DTYPES:
        got = gguf_dequant.gather(blocks.to(device), kind, ids.to(device), dtype)
        assert same(got.cpu(), rounded(want, dtype, device))
    assert gguf_dequant.gather(blocks.to(device), kind, ids[:0].to(device), torch.bfloat16).numel() == 0


@pytest.mark.parametrize("kind", SCALES)
def test_from_the_middle_of_a_file(kernels_on: None, device: str, kind: str) -> None:
    """Rows of a larger upload: blocks of two bytes' alignment begin there on odd words."""
    blocks = drawn(kind, 6, 1, seed=8).to(device)
    out = torch.full((5, KINDS[kind].values), float("nan"), device=device)
    gguf_dequant.dequantise(blocks[1:], kind, out)
    assert same(out.cpu(), wanted(blocks[1:].cpu(), kind))


@pytest.mark.parametrize("kind", SCALES)
def test_no_launch_lets_multiply_adds_be_contracted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter would never do it; a GPU does unless told."""
    from graftune.kernels.gguf_dequant import kernel

    asked: list[dict[str, Any]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: asked.append(options)

    monkeypatch.setitem(kernel.LAUNCHES, kind, (Recorder(), kernel.LAUNCHES[kind][1]))
    kernel.dequantise(drawn(kind, 1, 1, seed=0), kind, torch.empty(1, KINDS[kind].values), None)
    assert [options["enable_fp_fusion"] for options in asked] == [False]


@pytest.mark.parametrize("kind", SCALES)
def test_experts_without_rows_are_left_out(kernels_on: None, device: str, kind: str) -> None:
    blocks = drawn(kind, 12, 2, seed=9)
    out = torch.full((12, 2 * KINDS[kind].values), float("nan"), device=device)
    used = torch.tensor([0, 0, 5, 5, 6], dtype=torch.int32, device=device)
    gguf_dequant.dequantise(blocks.to(device), kind, out, used=used)
    want = wanted(blocks, kind)
    assert same(out[3:6].cpu(), want[3:6]) and same(out[9:].cpu(), want[9:])
    assert bool(out[:3].isnan().all()) and bool(out[6:9].isnan().all())
