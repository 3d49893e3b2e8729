"""Gated units: the kernel against the reference, both ways; rows of what is written may lie apart, nothing beside
them is touched."""

from __future__ import annotations

import pytest
import torch

from graftune.kernels import fp8, swiglu
from graftune.kernels.swiglu import reference
from graftune.model.projection import augmented_buffer
from tests.kernels.harness import DTYPES, NAN, ROUNDED, buffer, close, filled, untouched
from tests.support.pairwise import pairwise

SIZES = [(1, 1), (1, 2), (3, 7), (9, 30), (5, 257), (2, 2049), (3, 4097)]  # the last: one more than a block


def inputs(tokens: int, width: int, dtype: torch.dtype, device: str, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and the gradient of the activation; of a clamped unit, beyond its limits here and there."""
    torch.manual_seed(tokens + width)
    gate_up, grad = torch.randn(tokens, 2 * width) * (5 if kind == "clamped" else 1), torch.randn(tokens, width)
    return gate_up.to(dtype).to(device), grad.to(dtype).to(device)


@pairwise(("tokens, width", SIZES), ("padding", [0, 5]), ("dtype", DTYPES), ("kind", swiglu.KINDS))
def test_forward(kernels_on, device, tokens, width, padding, dtype, kind):
    gate_up, _ = inputs(tokens, width, dtype, device, kind)
    wide, act = buffer(tokens, width, padding, gate_up)
    before, want = gate_up.clone(), torch.full((tokens, width), NAN, device=device)
    swiglu.forward(gate_up, act, kind)
    reference.forward(gate_up.float(), want, kind)
    close(act, want, ROUNDED[dtype])
    assert untouched(wide, act) and torch.equal(gate_up, before)


@pairwise(
    ("tokens, width", SIZES),
    ("paddings", [(0, 0, 0), (3, 8, 1), (0, 5, 0)]),
    ("dtype", DTYPES),
    ("kind", swiglu.KINDS),
)
def test_backward(kernels_on, device, tokens, width, paddings, dtype, kind):
    """paddings: columns beside the gradient that comes, the one that goes, and the activation."""
    gate_up, grad = inputs(tokens, width, dtype, device, kind)
    before = gate_up.clone()
    grad_wide, given = filled(grad, paddings[0])
    out_wide, out = buffer(tokens, 2 * width, paddings[1], grad)
    act_wide, act = buffer(tokens, width, paddings[2], grad)
    swiglu.backward(given, gate_up, out, act, kind)
    want, want_act = (torch.full((tokens, n), NAN, device=device) for n in (2 * width, width))
    reference.backward(grad.float(), gate_up.float(), want, want_act, kind)
    close(out[:, :width], want[:, :width], ROUNDED[dtype])
    close(out[:, width:], want[:, width:], ROUNDED[dtype])
    close(act, want_act, ROUNDED[dtype])
    assert all(untouched(w, i) for w, i in ((grad_wide, given), (out_wide, out), (act_wide, act)))
    assert torch.equal(given, grad) and torch.equal(gate_up, before)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(("dtype", "kind"), [*((dtype, "silu") for dtype in DTYPES), (torch.float32, "gelu")])
def test_far_gates_stay_finite(kernels_on, device, dtype, kind):
    """exp of them overflows; the activation is then the gate itself, or nothing."""
    gate = torch.tensor([-60000.0, -300.0, -90.0, 0.0, 90.0, 300.0, 60000.0])
    gate_up = torch.cat((gate, torch.full_like(gate, 0.5))).to(dtype).to(device)[None]
    grad = torch.full((1, len(gate)), 1.0, dtype=dtype, device=device)
    out, act = torch.full_like(gate_up, NAN), torch.full_like(grad, NAN)
    swiglu.backward(grad, gate_up, out, act, kind)
    rounded = gate.to(dtype).float()
    silu = rounded.clamp_min(0)
    close(act, silu[None] / 2, ROUNDED[dtype])
    close(out, torch.cat((rounded.sign().add(1) / 4, silu))[None], ROUNDED[dtype])
    swiglu.forward(gate_up, act.fill_(NAN), kind)
    close(act, silu[None] / 2, ROUNDED[dtype])


@pytest.mark.parametrize("kind", swiglu.KINDS)
@pytest.mark.parametrize("width", [37, 5000])
def test_rows_with_weights(kind, width, device, kernels_on):
    """In place, as a mixture's backward calls it."""
    grad, gate_up = torch.randn(3, width, device=device), 4 * torch.randn(3, 2 * width, device=device)
    weights = torch.rand(3, device=device)
    out, act = torch.empty_like(gate_up), torch.empty_like(grad)
    want = reference.backward(grad, gate_up, out, act, kind, weights)
    got = swiglu.backward(grad, gate_up, gate_up, grad, kind, weights)
    for ours, theirs in ((got, want), (gate_up, out), (grad, act)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def wide(x: torch.Tensor, padding: int) -> torch.Tensor:
    """x in a buffer with padding, which is full of NaN."""
    buffer = augmented_buffer(x, len(x), x.shape[1], padding).fill_(float("nan"))
    return buffer[:, : x.shape[1]].copy_(x)


@pairwise(("tokens, width", [(1, 1), (9, 30), (2, 2049)]), ("padding", [0, 5]), ("kind", swiglu.KINDS))
def test_in_place(kernels_on, device, tokens, width, padding, kind):
    gate_up, grad = inputs(tokens, width, torch.bfloat16, device, kind)
    out, act, forward = torch.empty_like(gate_up), torch.empty_like(grad), torch.empty_like(grad)
    swiglu.backward(grad, gate_up, out, act, kind)
    place, coming = wide(gate_up, padding), wide(grad, padding)
    swiglu.forward(place, forward, kind)
    swiglu.backward(coming, place, place, coming, kind)
    assert torch.equal(place, out) and torch.equal(coming, act) and torch.equal(forward, act)


@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (5, 48), (3, 4112)])
def test_in_place_beside_codes(kernels_on, device, tokens, width):
    gate_up, grad = inputs(tokens, width, torch.bfloat16, device, "silu")
    factor, reach = torch.rand(2 * width, device=device) + 0.5, torch.tensor(0.3, device=device)
    out, act = torch.empty_like(gate_up), torch.empty_like(grad)
    codes, codes_ = (fp8.buffer(tokens, 2 * width, torch.device(device), zero=True) for _ in range(2))
    scale = fp8.act_backward(grad, gate_up, out, act, codes, factor, reach=reach)
    scale_ = fp8.act_backward(grad, gate_up, gate_up, grad, codes_, factor, reach=reach)
    assert torch.equal(gate_up, out) and torch.equal(grad, act) and torch.equal(scale, scale_)
    assert torch.equal(codes.view(torch.uint8), codes_.view(torch.uint8)) and codes.float().abs().max() > 0
