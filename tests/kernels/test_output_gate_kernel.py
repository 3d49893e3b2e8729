"""The gate on attention's output: the kernel against the reference, the reference against autograd; rows and heads may
lie apart, nothing beside them is touched."""

from __future__ import annotations

import pytest
import torch

from graftune.kernels import output_gate
from graftune.kernels.output_gate import reference
from tests.kernels.harness import DTYPES, NAN, ROUNDED, close
from tests.support.pairwise import pairwise

SIZES = [(1, 1, 2), (3, 2, 20), (37, 3, 64), (5, 2, 256)]


def laid(x: torch.Tensor, step: int, behind: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, N, W] in rows of heads that are `step` values apart: the buffer, full of NaN elsewhere, and the view."""
    tokens, heads, width = x.shape
    buffer = torch.full((tokens, heads * step + behind), NAN, dtype=x.dtype, device=x.device)
    view = buffer[:, : heads * step].unflatten(1, (heads, step))[:, :, step - width :]
    view.copy_(x)
    return buffer, view


def drawn(size: tuple[int, int, int], by_head: bool, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """x, the gate and a gradient."""
    torch.manual_seed(sum(size))
    shapes = size, (*size[:2], 1 if by_head else size[2]), size
    return [torch.randn(shape).to(dtype).to(device) for shape in shapes]


@pairwise(("size", SIZES), ("by_head", [False, True]), ("apart", [False, True]), ("dtype", DTYPES))
def test_forward_and_backward(kernels_on, device, size, by_head, apart, dtype):
    """apart: gates lie between other columns, as in q."""
    x, gate, grad = drawn(size, by_head, dtype, device)
    step = gate.shape[2] * (2 if apart else 1)
    _, view = laid(gate, step)
    out_buffer, out = laid(torch.full_like(x, NAN), size[2])
    output_gate.forward(laid(x, size[2])[1], view, out)
    want = torch.empty_like(x, dtype=torch.float32)
    reference.forward(x.float(), gate.float(), want)
    close(out, want, ROUNDED[dtype])
    assert out_buffer.isnan().sum() == 3 * size[0], "only what is behind the rows"

    gate_buffer, grad_gate = laid(torch.full_like(gate, NAN), step)
    _, given = laid(grad, size[2])
    _, again = laid(torch.full_like(x, NAN), size[2])
    output_gate.backward(given, laid(x, size[2])[1], view, given, grad_gate, again)  # in place
    wanted = [torch.empty_like(t, dtype=torch.float32) for t in (x, gate, x)]
    reference.backward(grad.float(), x.float(), gate.float(), *wanted)
    for got, right in zip((given, grad_gate, again), wanted, strict=True):
        close(got, right, ROUNDED[dtype])
    assert gate_buffer.isnan().sum() == gate_buffer.numel() - gate.numel()
    elsewhere, alone = torch.full_like(x, NAN), torch.full_like(gate, NAN)
    output_gate.backward(grad, x, gate, elsewhere, alone)  # without the output
    for got, right in ((elsewhere, given), (alone, grad_gate)):  # another kernel: fp32 may be contracted differently
        close(got, right, ROUNDED[dtype])


@pytest.mark.parametrize("by_head", [False, True])
def test_the_reference_against_autograd(by_head):
    x, gate, grad = drawn((7, 3, 5), by_head, torch.float64, "cpu")
    leaves = [t.clone().requires_grad_() for t in (x, gate)]
    want = leaves[0] * leaves[1].sigmoid()
    want.backward(grad)
    out, grads = torch.empty_like(x), [torch.empty_like(t) for t in (x, gate)]
    reference.backward(grad, x, gate, *grads, out)
    close(out, want, 1e-6)
    for got, leaf in zip(grads, leaves, strict=True):
        close(got, leaf.grad, 1e-6)
