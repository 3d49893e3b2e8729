"""Our GGUF quantisers: what comes out is read alike by the gguf package, llama.cpp and ourselves, and is nearer to what
went in than llama.cpp's own output by plain squared error, and about as near by the error its search weighs. Q8_0, Q5_0
and Q5_1 are llama.cpp's to the byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from graftune.errors import GraftuneError
from graftune.kernels import gguf_dequant
from graftune.kernels.gguf_dequant.reference import CURVE
from graftune.weights import gguf_quant
from graftune.weights.gguf_quant import TYPES, quantise, search
from tests.weights import llama_cpp

BLOCKS = TYPES[3:]
SQUARES = ("Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS")  # llama.cpp weighs errors with the square of the value
WIDTH = 512
DRAWN = {
    "normal": lambda: torch.randn(128, WIDTH) * 0.02,
    "long tails": lambda: torch.distributions.StudentT(4.0).sample((128, WIDTH)) * 0.02,
    "off centre": lambda: torch.rand(128, WIDTH) - 0.3,
    "one sign": lambda: torch.rand(128, WIDTH) + 0.1,
    "rows of any size": lambda: torch.randn(128, WIDTH) * torch.logspace(-4, 2, 128)[:, None],
}


def package(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[kind]).astype(np.float32))


def rms(error: torch.Tensor) -> float:
    return float(error.double().square().mean().sqrt())


def their_weights(x: torch.Tensor, kind: str) -> torch.Tensor:
    """What llama.cpp's search multiplies squared errors with, where it searches."""
    if kind in SQUARES:
        return x.abs()
    groups = x.unflatten(1, (-1, 32))
    size = groups.square().mean(2, keepdim=True).sqrt() if kind.endswith("K") else torch.ones_like(groups)
    return (size + (groups.abs() if kind.endswith("K") else 0)).sqrt().view_as(x)


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("kind", BLOCKS)
def test_the_error_is_no_larger_than_llama_cpps(kind: str, drawn: str) -> None:
    x = DRAWN[drawn]()
    size = x.abs().amax(1, keepdim=True)  # every row counts alike
    ours, theirs = ((package(blocks, kind) - x) / size for blocks in (quantise(x, kind), llama_cpp.quantised(x, kind)))
    w = their_weights(x / size, kind)
    print(f"{kind} {drawn}: rms {rms(ours):.3e}, llama.cpp {rms(theirs):.3e}, ratio {rms(ours) / rms(theirs):.4f}")
    if kind not in ("Q8_0", "Q5_0", "Q5_1"):
        assert 0 < rms(ours) < rms(theirs)
        assert rms(ours * w) < rms(theirs * w) * (1.06 if kind in SQUARES else 1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_everybody_reads_the_same(kind: str) -> None:
    x = torch.randn(7, WIDTH)
    blocks = quantise(x, kind)
    assert blocks.dtype == torch.uint8 and blocks.shape == (7, gguf_dequant.row_bytes(kind, WIDTH))
    want, ours = package(blocks, kind), torch.empty_like(x)
    gguf_dequant.dequantise(blocks, kind, ours)
    assert torch.equal(ours, want)
    assert torch.equal(llama_cpp.dequantised(blocks, kind, WIDTH), want)
    assert rms(want - x) < {"Q3_K": 0.2, "MXFP4": 0.15}.get(kind, 0.1) and torch.equal(quantise(x, kind), blocks)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_plain_types(kind: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 33)
    assert torch.equal(quantise(x, kind).view(dtype), x.to(dtype))


@pytest.mark.parametrize("kind", BLOCKS)
def test_what_fits_exactly_comes_back_exactly(kind: str) -> None:
    """Values that the type itself made: the search finds the very scales again, or ones as good."""
    first = package(quantise(torch.randn(16, WIDTH), kind), kind)
    again = package(quantise(first, kind), kind)
    lost = rms(again - first) / rms(first)
    assert lost <= {"Q8_0": 0.0, "MXFP4": 0.0, "Q3_K": 0.03, "Q4_K": 0.03, "Q5_K": 0.02, "Q6_K": 0.012}.get(
        kind, 0.002
    ), lost


@pytest.mark.parametrize("kind", BLOCKS)
def test_odd_blocks(kind: str) -> None:
    """Nothing, one value only, all the same, one outlier, too small for fp16's scales, large."""
    rows = torch.zeros(9, WIDTH)
    rows[1, 3], rows[2], rows[3] = 1.5, 0.25, -7.0
    rows[4] = torch.randn(WIDTH) * 1e-3
    rows[4, 100] = 50.0
    rows[5], rows[6], rows[7] = torch.randn(WIDTH) * 1e-9, torch.randn(WIDTH) * 3e3, torch.randn(WIDTH) * 1e-38
    rows[8, :40] = -3.0
    got = package(quantise(rows, kind), kind)
    assert got.isfinite().all() and not got[0].any()
    error = (got - rows).abs().amax(1)
    seven = 1.0 if kind == "MXFP4" else 0.3  # between the levels 6 and 8
    assert (error <= torch.tensor([0, 0.06, 0.01, seven, 4, 1e-6, 3e3, 1e-6, 0.15])).all(), error
    other = package(llama_cpp.quantised(rows, kind), kind)
    worse = [(rms(a - x), rms(b - x)) for a, b, x in zip(got, other, rows, strict=True)]
    exact = 0.01 if kind == "Q3_K" else 3e-4  # scales that fit one group exactly need not fit the next one
    assert all(a <= 1.03 * b + exact * rms(x) for (a, b), x in zip(worse, rows, strict=True)), worse


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(11, WIDTH)
    whole = {kind: rms(package(quantise(x, kind), kind) - x) for kind in BLOCKS}
    monkeypatch.setattr(gguf_quant, "PIECE", 300)  # sums over a block may be added in another order
    assert all(rms(package(quantise(x, kind), kind) - x) == pytest.approx(whole[kind], rel=1e-3) for kind in BLOCKS)


def test_threads_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_quant, "PIECE", 2 * WIDTH)
    own, x = torch.get_num_threads(), torch.randn(64, WIDTH)
    try:
        torch.set_num_threads(1)
        alone = {kind: quantise(x, kind) for kind in ("Q8_0", "Q4_K", "IQ4_XS")}
        torch.set_num_threads(3)
        assert all(torch.equal(quantise(x, kind), blocks) for kind, blocks in alone.items())
    finally:
        torch.set_num_threads(own)


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q5_1"])
def test_llama_cpps_to_the_byte(kind: str) -> None:
    """Halves are rounded away from zero, as C's roundf does."""
    rows = [drawn() for drawn in DRAWN.values()]
    ties = torch.randint(-254, 255, (64, WIDTH)) / 2.0
    ties[:, ::32] = 127.0
    for x in (*rows, ties, torch.zeros(3, WIDTH)):
        assert torch.equal(quantise(x, kind), llama_cpp.quantised(x, kind))


def test_the_curve_is_searched_exactly() -> None:
    curve = search.Curve()
    levels, x = torch.tensor(CURVE, dtype=torch.float32), torch.linspace(-140, 140, 4001) + 1e-3
    want = (x[:, None] - levels).abs().argmin(1)
    assert torch.equal(curve.codes(x[:, None], torch.ones(1))[:, 0].long(), want)
    assert torch.equal(curve.nearest(x[:, None], torch.ones(1), torch.empty(4001, 1))[:, 0], levels[want])


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(GraftuneError, match=r"no quantiser for IQ2_XS; choose one of F32"):
        quantise(torch.zeros(2, 256), "IQ2_XS")
    with pytest.raises(GraftuneError, match="rows of 96 values are not made of whole Q4_K blocks of 256"):
        quantise(torch.zeros(2, 96), "Q4_K")
    for kind in TYPES:
        for bad in (float("nan"), float("inf")):
            x = torch.zeros(2, 256)
            x[1, 7] = bad
            with pytest.raises(GraftuneError, match="not finite"):
                quantise(x, kind)
    for kind, large in (("F16", 7e4), ("Q4_0", 1e6), ("Q5_1", 1e6), ("Q6_K", 1e12), ("Q5_K", 1e10), ("IQ4_XS", 1e12)):
        with pytest.raises(GraftuneError, match=f"does not fit {kind}"):
            quantise(torch.full((1, 256), large), kind)
