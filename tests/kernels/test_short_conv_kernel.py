"""Short convolutions, gated and with SiLU: the kernels against the reference, the reference against autograd of torch's
own convolution, document by document."""

from __future__ import annotations

import pytest
import torch

from graftune.kernels import short_conv
from graftune.kernels.short_conv import reference
from tests.kernels.harness import buffer, close, filled, untouched
from tests.support.pairwise import pairwise

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}

# (documents, width, taps): odd, tiny, documents shorter than the taps and across the tiles of 16 tokens and 128 columns
CASES = [((1,), 1, 3), ((2, 1, 1), 5, 3), ((16, 1, 30), 130, 3), ((7, 41), 33, 4), ((3, 3), 257, 2)]


def inputs(documents, width, taps, dtype, device):
    torch.manual_seed(width)
    tokens = sum(documents)
    bcx, grad = torch.randn(tokens, 3 * width), torch.randn(tokens, width)
    positions = torch.cat([torch.arange(n) for n in documents])
    return bcx.to(device, dtype), torch.randn(width, taps).to(device), positions.to(device), grad.to(device, dtype)


def by_torch(documents, bcx, taps):
    """A convolution of each document by itself."""
    found = []
    for part in bcx.split(documents):
        b, c, x = part.chunk(3, 1)
        u = torch.nn.functional.pad((b * x).t(), (taps.shape[1] - 1, 0))
        found.append(c * torch.nn.functional.conv1d(u, taps.unsqueeze(1), groups=len(taps)).t())
    return torch.cat(found)


@pytest.mark.parametrize(("documents", "width", "taps"), CASES)
def test_reference_is_autograds(documents, width, taps):
    bcx, weight, positions, grad = inputs(documents, width, taps, torch.float32, "cpu")
    bcx.requires_grad_(), weight.requires_grad_()
    want = by_torch(documents, bcx, weight)
    want.backward(grad)
    with torch.no_grad():
        out, grad_bcx, mixed = torch.empty_like(want), torch.empty_like(bcx), torch.empty_like(want)
        grad_taps = torch.zeros_like(weight)
        reference.forward(bcx, weight, positions, out)
        reference.backward(grad, bcx, weight, positions, grad_bcx, mixed, grad_taps)
    close(out, want, CLOSE[torch.float32])
    close(mixed, want, CLOSE[torch.float32])
    close(grad_bcx, bcx.grad, CLOSE[torch.float32])
    close(grad_taps, weight.grad, CLOSE[torch.float32])


@pairwise(("documents, width, taps", CASES), ("padding", [0, 8]), ("dtype", list(CLOSE)))
def test_kernel_is_the_references(kernels_on, device, documents, width, taps, padding, dtype):
    bcx, weight, positions, grad = inputs(documents, width, taps, dtype, device)
    tokens = len(bcx)
    bcx_wide, given = filled(bcx, padding)
    (out_wide, out), (grad_wide, grad_bcx), (mixed_wide, mixed) = (
        buffer(tokens, columns, padding, bcx) for columns in (width, 3 * width, width)
    )
    short_conv.forward(given, weight, positions, out)
    short_conv.backward(grad, given, weight, positions, grad_bcx, mixed)
    want, want_grad, want_mixed = (torch.empty(tokens, n, device=device) for n in (width, 3 * width, width))
    reference.forward(bcx.float(), weight, positions, want)
    reference.backward(grad.float(), bcx.float(), weight, positions, want_grad, want_mixed)
    for got, right in ((out, want), (grad_bcx, want_grad), (mixed, want_mixed)):
        close(got, right, CLOSE[dtype])
    for wide, inner in ((out_wide, out), (grad_wide, grad_bcx), (mixed_wide, mixed), (bcx_wide, given)):
        assert untouched(wide, inner)
    assert torch.equal(given, bcx)


def test_a_step_is_the_next_token():
    bcx, weight, positions, _ = inputs((9,), 6, 3, torch.float32, "cpu")
    want, got, state = torch.empty(9, 6), torch.empty(1, 6), torch.zeros(1, 2, 6)
    reference.forward(bcx, weight, positions, want)
    for token in range(9):
        short_conv.step_(bcx[token : token + 1], weight, state, got)
        close(got[0], want[token], CLOSE[torch.float32])


def silu_by_torch(documents, x, taps):
    found = []
    for part in x.split(documents):
        u = torch.nn.functional.pad(part.t(), (taps.shape[1] - 1, 0))
        found.append(torch.nn.functional.silu(torch.nn.functional.conv1d(u, taps.unsqueeze(1), groups=len(taps)).t()))
    return torch.cat(found)


@pytest.mark.parametrize(("documents", "width", "taps"), CASES)
def test_reference_with_silu_is_autograds(documents, width, taps):
    x, weight, positions, grad = inputs(documents, width, taps, torch.float32, "cpu")
    x = x[:, :width].clone().requires_grad_()
    weight.requires_grad_()
    want = silu_by_torch(documents, x, weight)
    want.backward(grad)
    with torch.no_grad():
        out, grad_x, grad_taps = torch.empty_like(want), torch.empty_like(x), torch.zeros_like(weight)
        short_conv.silu_forward(x, weight, positions, out)
        short_conv.silu_backward(grad, x, weight, positions, grad_x, grad_taps)
    close(out, want, CLOSE[torch.float32])
    close(grad_x, x.grad, CLOSE[torch.float32])
    close(grad_taps, weight.grad, CLOSE[torch.float32])


@pytest.mark.few(6)
@pairwise(("documents, width, taps", CASES), ("padding", [0, 8]), ("dtype", list(CLOSE)))
def test_kernel_with_silu_is_the_references(kernels_on, device, documents, width, taps, padding, dtype):
    x, weight, positions, grad = inputs(documents, width, taps, dtype, device)
    x = x[:, :width]
    x_wide, given = filled(x, padding)
    (out_wide, out), (grad_wide, grad_x) = (buffer(*x.shape, padding, x) for _ in range(2))
    short_conv.silu_forward(given, weight, positions, out)
    short_conv.silu_backward(grad, given, weight, positions, grad_x)
    want, want_grad = torch.empty_like(x, dtype=torch.float32), torch.empty_like(x, dtype=torch.float32)
    reference.silu_forward(x.float(), weight, positions, want)
    reference.silu_backward(grad.float(), x.float(), weight, positions, want_grad)
    for got, right in ((out, want), (grad_x, want_grad)):
        close(got, right, CLOSE[dtype])
    for wide, inner in ((out_wide, out), (grad_wide, grad_x), (x_wide, given)):
        assert untouched(wide, inner)


def test_a_step_with_silu_is_the_next_token():
    x, weight, positions, _ = inputs((9,), 6, 4, torch.float32, "cpu")
    x = x[:, :6]
    want, got, state = torch.empty(9, 6), torch.empty(1, 6), torch.zeros(1, 3, 6)
    reference.silu_forward(x, weight, positions, want)
    for token in range(9):
        short_conv.silu_step_(x[token : token + 1], weight, state, got)
        close(got[0], want[token], CLOSE[torch.float32])
