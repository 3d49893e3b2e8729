"""GGUF blocks against the gguf package's own dequantisation, to the bit: random blocks of every kind, values that the
package quantised, and the tensors of the real default base."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from graftune.kernels import gguf_dequant
from graftune.kernels.gguf_dequant import KINDS, reference, row_bytes
from graftune.weights.gguf_io import read_gguf

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = ["F32", "F16", "BF16"]
SCALES = {  # bytes of a block where its fp16 scales begin
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "MXFP4": (),
}  # fmt: skip
EXTREMES = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, -6.1e-5, 6.104e-5, 1.0, -1.0, 65504, -65504], np.float16)


def drawn(kind: str, rows: int, per_row: int, seed: int) -> torch.Tensor:
    """Blocks of random bytes, some of them with the smallest or the largest codes only; scales are any finite fp16
    number, every other one an extreme."""
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (rows * per_row, KINDS[kind].bytes), dtype=np.uint8)
    if kind in PLAIN:
        with np.errstate(invalid="ignore"):
            blocks[~np.isfinite(package(torch.from_numpy(blocks), kind)).ravel()] = 0
        return torch.from_numpy(blocks.reshape(rows, -1))
    fate = draw.integers(0, 8, len(blocks))
    blocks[fate == 0], blocks[fate == 1] = 0, 255
    if kind == "MXFP4":  # one byte: the two smallest, which are no normal numbers, the largest, and all between
        blocks[:, 0] = np.where(fate < 3, [(0, 1, 252)[f % 3] for f in fate], draw.integers(0, 253, len(blocks)))
    for at in SCALES[kind]:
        scale = draw.integers(0, 1 << 16, len(blocks)).astype(np.uint16).view(np.float16)
        scale = np.where(
            np.isfinite(scale) & (draw.random(len(blocks)) < 0.5), scale, draw.choice(EXTREMES, len(blocks))
        )
        blocks[:, at : at + 2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(blocks.reshape(rows, -1))


def package(blocks: torch.Tensor, kind: str) -> np.ndarray:
    return dequantize(blocks.numpy(), GGMLQuantizationType[kind]).astype(np.float32)


def wanted(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    values = torch.from_numpy(package(blocks, kind))
    assert values.isfinite().all()
    return values


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """To the bit, the sign of zero included."""
    assert got.dtype == want.dtype
    bits = torch.int32 if got.dtype == torch.float32 else torch.int16
    return torch.equal(got.contiguous().view(bits), want.contiguous().view(bits))


def poisoned(
    rows: int, width: int, padding: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN with padding beside and two rows below, and its corner."""
    wide = torch.full((rows + 2, width + padding), NAN, dtype=dtype, device=device)
    return wide, wide[:rows, :width]


def untouched(wide: torch.Tensor, inner: torch.Tensor) -> bool:
    return bool(wide[: len(inner), inner.shape[1] :].isnan().all() and wide[len(inner) :].isnan().all())


def test_blocks_are_as_large_as_the_package_says() -> None:
    assert {kind: tuple(block) for kind, block in KINDS.items()} == {
        kind: GGML_QUANT_SIZES[GGMLQuantizationType[kind]] for kind in (*PLAIN, *SCALES)
    }
    assert row_bytes("Q4_K", 512) == 288 and row_bytes("F32", 3) == 12
    with pytest.raises(AssertionError, match="whole blocks"):
        row_bytes("Q6_K", 128)


@pytest.mark.parametrize(("rows", "per_row"), [(1, 1), (1, 5), (7, 1), (33, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_random_blocks(kind: str, rows: int, per_row: int) -> None:
    blocks = drawn(kind, rows, per_row, seed=rows)
    before, want = blocks.clone(), wanted(blocks, kind)
    got = torch.full((rows, per_row * KINDS[kind].values), NAN)
    gguf_dequant.dequantise(blocks, kind, got)
    assert same(got, want) and torch.equal(blocks, before)
    assert rows < 33 or want.unique().numel() > 50


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_once_into_rows_that_lie_apart(kind: str, dtype: torch.dtype, padding: int) -> None:
    blocks = drawn(kind, 9, 2, seed=2)
    wide, out = poisoned(9, 2 * KINDS[kind].values, padding, dtype)
    gguf_dequant.dequantise(blocks, kind, out)
    assert same(out, wanted(blocks, kind).to(dtype)) and untouched(wide, out)


def test_rounding_is_to_even() -> None:
    """1 + 1/256 lies between two bf16 numbers, and so does 1 + 3/256: one goes down, the other up."""
    blocks = torch.tensor([[1 + 1 / 256, 1 + 3 / 256]]).view(torch.uint8)
    out = torch.empty(1, 2, dtype=torch.bfloat16)
    gguf_dequant.dequantise(blocks, "F32", out)
    assert out.tolist() == [[1.0, 1.015625]]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "F16", "BF16", "F32"])
def test_quantised_values(kind: str) -> None:
    values = np.random.default_rng(3).normal(0, 0.02, (11, 576)).astype(np.float32)
    blocks = torch.from_numpy(quantize(values, GGMLQuantizationType[kind]).view(np.uint8))
    got = torch.full((11, 576), NAN)
    gguf_dequant.dequantise(blocks, kind, got)
    assert same(got, wanted(blocks, kind))
    assert np.abs(got.numpy() - values).mean() < (0.15 if kind == "MXFP4" else 0.1) * np.abs(values).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_rows_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the pieces; and none is larger than it may be, so no second copy of a weight ever exists."""
    width = 2 * KINDS[kind].values
    blocks, got, sizes = drawn(kind, 10, 2, seed=4), torch.full((10, width), NAN), []
    if kind not in PLAIN:
        decode = reference._DECODE[kind]
        monkeypatch.setitem(reference._DECODE, kind, lambda piece: (sizes.append(len(piece)), decode(piece))[1])
    monkeypatch.setattr(reference, "PIECE", 3 * width + 1)
    gguf_dequant.dequantise(blocks, kind, got)
    assert same(got, wanted(blocks, kind)) and sizes in ([], [6, 6, 6, 2])
    monkeypatch.setattr(reference, "PIECE", 1)
    gguf_dequant.dequantise(blocks, kind, got.fill_(NAN))
    assert same(got, wanted(blocks, kind)) and sizes[4:] in ([], [2] * 10)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_gather(kind: str, index: torch.dtype) -> None:
    blocks = drawn(kind, 13, 2, seed=5)
    ids = torch.tensor([12, 0, 0, 7, 3, 12], dtype=index)
    want = wanted(blocks, kind)[ids.long()]
    for dtype in DTYPES:
        got = gguf_dequant.gather(blocks, kind, ids, dtype)
        assert got.is_contiguous() and same(got, want.to(dtype))
    assert gguf_dequant.gather(blocks, kind, ids[:0], torch.bfloat16).shape == (0, want.shape[1])


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "F16"])
def test_rows_in_another_order(kind: str) -> None:
    """What a GGUF's query and key weights need."""
    blocks, order = drawn(kind, 13, 1, seed=6), torch.randperm(13)
    wide, out = poisoned(13, KINDS[kind].values, 3, torch.float32)
    gguf_dequant.dequantise(blocks, kind, out, order)
    assert same(out, wanted(blocks, kind)[order]) and untouched(wide, out)


def test_what_does_not_fit_is_refused() -> None:
    blocks, out = drawn("Q4_0", 4, 2, seed=7), torch.empty(4, 64)
    for wrong in (
        (blocks, "Q4_1", out),
        (blocks, "IQ1_S", out),
        (blocks[:3], "Q4_0", out),
        (blocks, "Q4_0", out[:, :32]),
        (blocks, "Q4_0", torch.empty(64, 4).t()),
        (blocks, "Q4_0", out.double()),
        (blocks.view(torch.int8), "Q4_0", out),
        (blocks[:, :18], "Q4_0", out[:, :32]),
        (blocks, "Q4_0", out, torch.tensor([0, 1, 2])),
        (blocks, "Q4_0", out, torch.tensor([0.0, 1, 2, 3])),
    ):
        with pytest.raises(AssertionError):
            gguf_dequant.dequantise(*wrong)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_the_default_base(smollm2: Path) -> None:
    """Every kind that the file holds, and its largest tensor, by pieces that do not divide it."""
    tensors = [tensor for tensor in read_gguf(smollm2).tensors.values() if tensor.dtype_name in KINDS]
    largest = max(tensors, key=lambda tensor: tensor.nbytes)
    chosen = {tensor.dtype_name: tensor for tensor in tensors} | {"": largest}
    assert {"F32", "Q4_1"} <= set(chosen)
    for tensor in (*chosen.values(), *tensors[10:20]):
        blocks, kind = torch.from_numpy(tensor.blocks), tensor.dtype_name
        want = wanted(blocks, kind)
        for dtype in DTYPES[: 1 if tensor is largest else None]:
            got = torch.full(want.shape, NAN, dtype=dtype)
            gguf_dequant.dequantise(blocks, kind, got)
            assert same(got, want.to(dtype)), (kind, dtype)
        ids = torch.randint(len(blocks), (100,))
        assert same(gguf_dequant.gather(blocks, kind, ids, torch.float32), want[ids])
