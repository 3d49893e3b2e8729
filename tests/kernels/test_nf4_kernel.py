"""NF4: the kernels against the reference to the bit, and the reference against itself in pieces, rows and files. That
its bytes are bitsandbytes' is shown in tests/parity."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load, save

from graftune.errors import GraftuneError
from graftune.kernels import nf4
from graftune.kernels.nf4 import Nf4, reference
from tests.support import quantised
from tests.support.pairwise import pairwise

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One value, odd ends, rows of no whole word or block, a whole block, one program of the kernel and a bit, many groups.
SHAPES = [(1,), (1, 2), (3, 7), (5, 12), (9, 72), (1, 64), (3, 64), (2, 2049), (7, 640), (4106,), (2, 3, 40), (300, 64)]


def weight(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Blocks of every size, zeros and denormals among them (none in bf16: Triton's interpreter scrambles them)."""
    torch.manual_seed(seed + sum(shape))
    x = torch.randn(shape)
    flat = x.view(-1)
    denormal = {torch.float32: 1e-39, torch.float16: 1e-6, torch.bfloat16: 1e-30}[dtype]
    for start, factor in ((64, 0.0), (128, denormal), (192, 3e3), (256, 1e-3)):
        flat[start : start + 64] *= factor
    return x.to(dtype)


def same(got: Nf4, want: Nf4) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype) and got.tensors.keys() == want.tensors.keys()
    for name, x in want.tensors.items():
        assert torch.equal(got.tensors[name].cpu(), x.cpu()), name


def rounded(exact: torch.Tensor, dtype: torch.dtype, device: str) -> torch.Tensor:
    """As a kernel rounds it: Triton's interpreter cuts bf16 off instead, and scrambles its denormals."""
    if dtype == torch.bfloat16 and device == "cpu":
        cut = (exact.view(torch.int32) & -65536).view(torch.float32)
        return torch.where(cut.abs() < torch.finfo(dtype).tiny, 0.0, cut).to(dtype)
    return exact.to(dtype)


def equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """To the bit, but for the sign of zero."""
    return got.dtype == want.dtype and torch.equal(got.cpu(), want.cpu())


@pairwise(("shape", SHAPES), ("dtype", DTYPES), ("double", [True, False]))
def test_dequantise(kernels_on, device, shape, dtype, double):
    quantised = nf4.quantise(weight(shape).to(device), double=double)
    exact = reference.values(quantised.to("cpu"), 0, quantised.numel).view(shape)
    poisoned = torch.full(shape, NAN, dtype=dtype, device=device)
    assert nf4.dequantise(quantised, dtype, poisoned) is poisoned
    assert equal(nf4.dequantise(quantised, dtype), poisoned)
    if dtype == torch.bfloat16 and device == "cpu":
        poisoned[poisoned.abs() < torch.finfo(dtype).tiny] = 0.0
    assert equal(poisoned, rounded(exact, dtype, device))


@pairwise(
    ("fused", [True, False]),
    ("shape", [(3, 7), (5, 12), (9, 72), (7, 640), (2, 2049), (300, 64)]),
    ("padding", [8, 3]),
    ("double", [True, False]),
)
def test_rows_apart(request, device, shape, padding, double, fused):
    """Into the corner of a wider buffer, all rows and some: nothing beside or below is touched."""
    quantised = nf4.quantise(weight(shape), double=double)
    exact = reference.values(quantised, 0, quantised.numel).view(shape)
    if fused:
        request.getfixturevalue("kernels_on")
    else:
        device = "cpu"
    quantised = quantised.to(device)
    rows, width = shape
    for start, stop in ((0, rows), (1, rows), (rows // 2, rows // 2 + 1)):
        wide = torch.full((rows + 1, width + padding), NAN, dtype=torch.float16, device=device)
        inner = wide[: stop - start, :width]
        nf4.dequantise(quantised, out=inner, rows=(start, stop))
        assert equal(inner, exact[start:stop].half())
        assert wide[:, width:].isnan().all() and wide[stop - start :].isnan().all()
        assert equal(nf4.dequantise(quantised, torch.float32, rows=(start, stop)), exact[start:stop])


@pairwise(("shape", SHAPES), ("dtype", DTYPES), ("double", [True, False]))
def test_quantise(request, device, shape, dtype, double):
    x = weight(shape, dtype)
    want = nf4.quantise(x, double=double)
    request.getfixturevalue("kernels_on")
    same(nf4.quantise(x.to(device), double=double), want)


@pytest.mark.parametrize("count", [1, 63, 64, 130])
def test_quantise_nothing_but_zeros(request, device, count):
    want = nf4.quantise(torch.zeros(count), double=False)
    assert (want.codes == 0x77).all() and bool(want.absmax[-1]) == bool(count % 64)
    request.getfixturevalue("kernels_on")
    same(nf4.quantise(torch.zeros(count, device=device), double=False), want)


def test_quantise_at_the_borders(request, device):
    """Values next to and on each border between two codes; and a ragged block, which is divided, not multiplied."""
    edges = reference.borders(torch.device("cpu"))
    infinity = torch.full_like(edges, math.inf)
    x = torch.cat((edges, edges.nextafter(infinity), edges.nextafter(-infinity), torch.ones(19)))
    x = torch.stack([x * factor for factor in (1.0, 3.0, 1e-37, 0.7)]).view(-1)[:243]
    want = nf4.quantise(x, double=False)
    found = torch.stack((want.codes >> 4, want.codes & 15), 1).view(-1)[:45].int()
    code = torch.arange(15, dtype=torch.int32)
    assert torch.equal(found, torch.cat((code, code + 1, code)))
    request.getfixturevalue("kernels_on")
    same(nf4.quantise(x.to(device), double=False), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [[64] * 10, [16384, 100], [1, 62, 1, 1, 200, 64, 3], [7] * 33, [500]], ids=str)
def test_pieces(request, device, sizes, dtype):
    x = weight((sum(sizes),), dtype)
    want = nf4.quantise(x)
    for fused in (False, True):
        if fused:
            request.getfixturevalue("kernels_on")
        got = nf4.quantise_pieces(iter(x.to(device if fused else "cpu").split(sizes)), x.shape, dtype)
        same(got, want)
    x = x.to(device)
    with pytest.raises(AssertionError):
        nf4.quantise_pieces(x.split(sizes)[:-1], x.shape, dtype)
    with pytest.raises(AssertionError):
        nf4.quantise_pieces([x, x[:1]], x.shape, dtype)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", [(33, 64), (150, 192), (40, 30), (7, 129)], ids=str)
def test_gather(request, device, shape, double):
    quantised = nf4.quantise(weight(shape, torch.float16), double=double)
    want = nf4.dequantise(quantised)
    ids = torch.tensor([shape[0] - 1, 0, 3, 3, 1])
    assert equal(nf4.gather(quantised, ids), want[ids])
    request.getfixturevalue("kernels_on")
    assert equal(nf4.gather(quantised.to(device), ids.to(device)), want[ids])
    assert equal(nf4.gather(quantised.to(device), ids.to(device), torch.float32)[:, 0].half(), want[ids, 0])


def test_nearest_is_torchs_bucketize():
    x = torch.cat((torch.linspace(-1, 1, 100_001), torch.tensor([-0.0, 1e-45])))
    edges = reference.borders(x.device)
    assert torch.equal(reference.nearest(x), torch.bucketize(x, edges).to(torch.uint8))
    assert torch.equal(reference.nearest(torch.tensor(reference.TABLE)), torch.arange(16, dtype=torch.uint8))


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 7), (300, 64)], ids=str)
def test_files(shape, dtype, double):
    want = nf4.quantise(weight(shape, dtype), double=double)
    other = nf4.quantise(weight(shape, dtype, seed=1), double=double)
    files = load(save(quantised.nf4_checkpoint(other, "a.weight") | quantised.nf4_checkpoint(want, "b.weight")))
    assert len(files) == (12 if double else 8)
    same(nf4.from_checkpoint(files, "b.weight"), want)


def test_files_that_are_refused():
    good = quantised.nf4_checkpoint(nf4.quantise(weight((3, 70))), "w")
    state = "w.quant_state.bitsandbytes__nf4"
    text = bytes(good[state].tolist())

    def told(changed: bytes) -> dict[str, torch.Tensor | None]:
        return {state: torch.tensor(list(changed), dtype=torch.uint8)}

    for said, changed in (
        ("not bitsandbytes' NF4", {state: None}),
        ("fp4", {state: None, state.replace("nf4", "fp4"): good[state]}),
        ("block size is 16", told(text.replace(b": 64", b": 16"))),
        ("dtype int8", told(text.replace(b"float32", b"int8", 1))),
        ("quant_map", {"w.quant_map": good["w.quant_map"].flip(0)}),
        ("number of codes", {"w": good["w"][:-1]}),
        ("number of scales", {"w.absmax": good["w.absmax"][:-1]}),
        ("number of nested scales", {"w.nested_absmax": good["w.nested_absmax"].repeat(2)}),
        ("number of nested codes", {"w.nested_quant_map": good["w.nested_quant_map"][:7]}),
        ("kind of scales", {"w.absmax": good["w.absmax"].float()}),
        ("w.quant_map is missing", {"w.quant_map": None}),
        ("not valid JSON", told(text[:9])),
        ("not valid JSON", told(b"[1]")),
        ("shape is", told(text.replace(b"[3,", b"[-3,"))),
        ("offset", told(text[: text.index(b', "nested_offset')] + b"}")),
    ):
        files = {name: x for name, x in (good | changed).items() if x is not None}
        with pytest.raises(GraftuneError, match=said):
            nf4.from_checkpoint(files, "w")


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_codes_stored_as_another_dtype(storage):
    want = nf4.quantise(weight((3, 64)))
    files = quantised.nf4_checkpoint(want, "w")
    files["w"] = files["w"].view(-1).view(storage)[:, None]
    same(nf4.from_checkpoint(files, "w"), want)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("double", [True, False])
def test_what_is_not_finite_is_refused(bad, double):
    x = torch.ones(130)
    x[77] = bad
    with pytest.raises(GraftuneError, match="NaN or infinity"):
        nf4.quantise(x, double=double)


@pytest.mark.few(1)
@pytest.mark.parametrize("double", [True, False])
def test_experts_are_one_weight(kernels_on, device, double):
    """Each with the codes and scales that it has alone; those without rows are left out."""
    parts = [nf4.quantise(weight((256, 64), seed=seed).to(device), double=double) for seed in range(6)]
    together = nf4.joined(parts)
    assert together is not None and together.shape == (1536, 64)
    want = torch.cat([nf4.dequantise(part) for part in parts])
    assert equal(nf4.dequantise(together), want) and equal(nf4.dequantise(together, rows=(300, 900)), want[300:900])
    assert equal(nf4.gather(together, torch.tensor([1, 1500], device=device)), want[[1, 1500]])
    out = torch.full((1536, 72), NAN, device=device)
    nf4.dequantise(together, out=out[:, :64], used=torch.tensor([0, 4, 4, 9], dtype=torch.int32, device=device))
    assert equal(out[:512, :64], want[:512]) and equal(out[1024:, :64], want[1024:])
    assert bool(out[512:1024].isnan().all())
    assert nf4.joined([parts[0], nf4.quantise(weight((128, 64)).to(device))]) is None, "of other sizes"
    assert double == (nf4.joined([nf4.quantise(weight((255, 64)).to(device), double=double)] * 2) is None), (
        "within a group"
    )
