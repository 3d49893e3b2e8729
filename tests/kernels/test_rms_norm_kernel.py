"""The norm with the residual add: the kernel against the reference, both ways; rows may lie apart, nothing beside them
is read or written."""

from __future__ import annotations

import math

import pytest
import torch

from graftune.kernels import rms_norm
from graftune.kernels.rms_norm import reference
from tests.kernels.harness import DTYPES, NAN, ROUNDED, buffer, close, filled, untouched
from tests.support.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("poison")
SIZES = [(1, 2), (1, 1024), (5, 3), (9, 96), (2, 129), (3, 1025), (2, 4097)]


def inputs(tokens: int, width: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """x, y and the norm's weight."""
    torch.manual_seed(tokens * width)
    x, y = (torch.randn(tokens, width).to(dtype).to(device) for _ in range(2))
    return x, y, torch.rand(width).add(0.5).to(device)


@pairwise(("tokens, width", SIZES), ("added", [True, False]), ("padding", [0, 5]), ("dtype", DTYPES))
def test_forward(kernels_on, device, tokens, width, added, padding, dtype):
    x, y, weight = inputs(tokens, width, dtype, device)
    ours, theirs = y.clone(), y.clone()
    wide, out = buffer(tokens, width, padding, x)
    want, before = torch.full_like(x, NAN), x.clone()
    total, rstd = rms_norm.add_forward(x, ours if added else None, weight, 1e-5, out)
    want_total, want_rstd = reference.add_forward(x, theirs if added else None, weight, 1e-5, want)
    assert total is (ours if added else x) and torch.equal(x, before) and rstd.dtype == torch.float32
    if added and dtype == torch.bfloat16 and device == "cpu":
        close(total, want_total, ROUNDED[dtype])
        close(rstd, want_rstd, ROUNDED[dtype])
    else:
        assert torch.equal(total, want_total)
        close(rstd, want_rstd, ROUNDED[torch.float32])
    close(out, want, ROUNDED[dtype])
    assert untouched(wide, out)
    assert torch.equal(rms_norm.apply(total, rstd, weight), out), "the norm again, bit for bit"


@pairwise(("tokens, width", SIZES), ("residual_padding", [None, 0, 7]), ("learns", [True, False]), ("dtype", DTYPES))
def test_backward(kernels_on, device, tokens, width, residual_padding, learns, dtype):
    """residual_padding: None without a residual, else the columns beside it."""
    x, grad, weight = inputs(tokens, width, dtype, device)
    rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-5)
    residual = None if residual_padding is None else torch.randn(tokens, width).to(dtype).to(device)
    totals = [torch.full_like(weight, 3.0) if learns else None for _ in range(2)]
    wide_residual = None if residual is None else residual.float().clone()
    want = reference.add_backward(grad.float(), x.float(), rstd, weight, wide_residual, totals[1])
    grad_wide, coming = filled(grad, 3)
    wide, given = (None, None) if residual is None else filled(residual, residual_padding)
    got = rms_norm.add_backward(coming, x, rstd, weight, given, totals[0])
    assert got.dtype == dtype and (given is None or got is given)
    close(got, want, ROUNDED[dtype])
    assert wide is None or untouched(wide, given)
    assert torch.equal(coming, grad) and untouched(grad_wide, coming)
    if learns:  # accumulated into, not overwritten; summed in fp32 whatever the dtype
        close(totals[0], totals[1], ROUNDED[torch.float32])


@pytest.mark.parametrize(("tokens", "programs"), [(1, 4), (4, 4), (5, 4), (37, 4), (13, 1)])
def test_the_weights_gradient_of_rows_that_share_a_program(kernels_on, device, tokens, programs, monkeypatch):
    from graftune.kernels.rms_norm import kernel

    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    x, grad, weight = inputs(tokens, 6, torch.float32, device)
    _, x = filled(x, 0)  # whoever goes on behind the last token meets NaN
    rstd = torch.full((tokens + 9,), NAN, device=device)[:tokens].copy_(torch.rsqrt(x.square().mean(-1) + 1e-5))
    found = []
    for _ in range(2):
        total, (wide, along) = torch.full_like(weight, -2.0), filled(grad.flip(0), 1)
        found.append((rms_norm.add_backward(grad, x, rstd, weight, along, total), total))
        assert untouched(wide, along)
    want_total = torch.full_like(weight, -2.0)
    want = reference.add_backward(grad, x, rstd, weight, grad.flip(0), want_total)
    close(found[0][0], want, ROUNDED[torch.float32])
    close(found[0][1], want_total, ROUNDED[torch.float32])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "the same bits every time"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_beyond_fp16_and_rows_of_zeros(kernels_on, device, dtype):
    x = torch.randn(3, 20).mul(5000).to(dtype).to(device)
    x[1] = 0
    weight, out = torch.ones(20, device=device), torch.full_like(x, NAN)
    _, rstd = rms_norm.add_forward(x, None, weight, 1e-6, out)
    assert math.isclose(rstd[1].item(), 1000.0, rel_tol=1e-5) and not out[1].any()
    want = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    close(out, want, ROUNDED[dtype])
