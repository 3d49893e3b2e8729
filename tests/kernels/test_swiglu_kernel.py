"""SwiGLU: the kernel against the reference, both ways; rows of what is written may lie apart, nothing beside them is
touched."""

from __future__ import annotations

import pytest
import torch

from graftune.kernels import swiglu
from graftune.kernels.swiglu import reference
from tests.support.pairwise import pairwise

# One rounding of the result; twice that in bf16, which Triton's interpreter cuts off instead of rounding it.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 5e-4}
DTYPES = list(TOLERANCE)
SIZES = [(1, 1), (1, 2), (3, 7), (9, 30), (5, 257), (2, 2049), (3, 4097)]  # the last: one more than a block
NAN = float("nan")


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    got, want = got.float(), want.float()
    assert got.shape == want.shape and got.isfinite().all()
    off = (got - want).norm() / (want.norm() + 1e-6)
    assert off <= TOLERANCE[dtype], (off, (got - want).abs().max(), want.abs().max())


def inputs(tokens: int, width: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and the gradient of the activation."""
    torch.manual_seed(tokens + width)
    gate_up, grad = torch.randn(tokens, 2 * width), torch.randn(tokens, width)
    return gate_up.to(dtype).to(device), grad.to(dtype).to(device)


def buffer(tokens: int, width: int, padding: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN with padding beside and two rows below, and its corner."""
    wide = torch.full((tokens + 2, width + padding), NAN, dtype=like.dtype, device=like.device)
    return wide, wide[:tokens, :width]


def untouched(wide: torch.Tensor, inner: torch.Tensor) -> bool:
    return bool(wide[: len(inner), inner.shape[1] :].isnan().all() and wide[len(inner) :].isnan().all())


@pairwise(("tokens, width", SIZES), ("padding", [0, 5]), ("dtype", DTYPES))
def test_forward(kernels_on, device, tokens, width, padding, dtype):
    gate_up, _ = inputs(tokens, width, dtype, device)
    wide, act = buffer(tokens, width, padding, gate_up)
    before, want = gate_up.clone(), torch.full((tokens, width), NAN, device=device)
    swiglu.forward(gate_up, act)
    reference.forward(gate_up.float(), want)
    close(act, want, dtype)
    assert untouched(wide, act) and torch.equal(gate_up, before)


@pairwise(("tokens, width", SIZES), ("paddings", [(0, 0, 0), (3, 8, 1), (0, 5, 0)]), ("dtype", DTYPES))
def test_backward(kernels_on, device, tokens, width, paddings, dtype):
    """paddings: columns beside the gradient that comes, the one that goes, and the activation."""
    gate_up, grad = inputs(tokens, width, dtype, device)
    before = gate_up.clone()
    (grad_wide, given), (out_wide, out), (act_wide, act) = (
        buffer(tokens, columns, padding, grad)
        for columns, padding in zip((width, 2 * width, width), paddings, strict=True)
    )  # fmt: skip
    given.copy_(grad)
    swiglu.backward(given, gate_up, out, act)
    want, want_act = (torch.full((tokens, n), NAN, device=device) for n in (2 * width, width))
    reference.backward(grad.float(), gate_up.float(), want, want_act)
    close(out[:, :width], want[:, :width], dtype)
    close(out[:, width:], want[:, width:], dtype)
    close(act, want_act, dtype)
    assert all(untouched(w, i) for w, i in ((grad_wide, given), (out_wide, out), (act_wide, act)))
    assert torch.equal(given, grad) and torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_activation_is_the_same_both_ways(kernels_on, device, dtype):
    gate_up, grad = inputs(9, 33, dtype, device)
    forward, backward, out = torch.full_like(grad, NAN), torch.full_like(grad, NAN), torch.full_like(gate_up, NAN)
    swiglu.forward(gate_up, forward)
    swiglu.backward(grad, gate_up, out, backward)
    close(forward, backward, dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES)
def test_far_gates_stay_finite(kernels_on, device, dtype):
    """exp of them overflows; silu is then the gate itself, or nothing."""
    gate = torch.tensor([-60000.0, -300.0, -90.0, 0.0, 90.0, 300.0, 60000.0])
    gate_up = torch.cat((gate, torch.full_like(gate, 0.5))).to(dtype).to(device)[None]
    grad = torch.full((1, len(gate)), 1.0, dtype=dtype, device=device)
    out, act = torch.full_like(gate_up, NAN), torch.full_like(grad, NAN)
    swiglu.backward(grad, gate_up, out, act)
    rounded = gate.to(dtype).float()
    silu = rounded.clamp_min(0)
    close(act.cpu(), silu[None] / 2, dtype)
    close(out.cpu(), torch.cat((rounded.sign().add(1) / 4, silu))[None], dtype)
    swiglu.forward(gate_up, act.fill_(NAN))
    close(act.cpu(), silu[None] / 2, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), SIZES[2:])
def test_geglu(kernels_on, device, tokens, width, dtype):
    gate_up, grad = inputs(tokens, width, dtype, device)
    act, again, out = torch.full_like(grad, NAN), torch.full_like(grad, NAN), torch.full_like(gate_up, NAN)
    swiglu.forward(gate_up, act, "gelu")
    swiglu.backward(grad, gate_up, out, again, "gelu")
    want, want_act = (torch.full((tokens, n), NAN, device=device) for n in (2 * width, width))
    reference.backward(grad.float(), gate_up.float(), want, want_act, "gelu")
    for got, right in ((out, want), (act, want_act), (again, want_act)):
        close(got, right, dtype)


def test_the_references_equal_autograd():
    """So that the kernels are not compared with one mistake of their own."""
    functions = torch.nn.functional
    kinds = {"silu": functions.silu, "gelu": lambda x: functions.gelu(x, approximate="tanh")}
    for kind, plain in kinds.items():
        gate_up = torch.randn(7, 10, requires_grad=True)
        want, grad = plain(gate_up[:, :5]) * gate_up[:, 5:], torch.randn(7, 5)
        want.backward(grad)
        out, act = torch.full((7, 10), NAN), torch.full((7, 5), NAN)
        reference.backward(grad, gate_up.detach(), out, act, kind)
        assert gate_up.grad is not None
        assert (out - gate_up.grad).abs().max() < 1e-6 and (act - want).abs().max() < 1e-6


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_far_gates_of_geglu_stay_finite(kernels_on, device):
    gate = torch.tensor([-3000.0, -60.0, -9.0, 0.0, 9.0, 60.0, 3000.0])
    gate_up = torch.cat((gate, torch.full_like(gate, 0.5))).to(device)[None]
    grad = torch.ones(1, len(gate), device=device)
    out, act = torch.full_like(gate_up, NAN), torch.full_like(grad, NAN)
    swiglu.backward(grad, gate_up, out, act, "gelu")
    close(act.cpu(), gate.clamp_min(0)[None] / 2, torch.float32)
    close(out.cpu(), torch.cat((gate.sign().add(1) / 4, gate.clamp_min(0)))[None], torch.float32)
