"""The gates and the gated norm of the delta rule: the kernels against the references, those against autograd."""

from __future__ import annotations

import pytest
import torch

from graftune.kernels import delta_gates, gated_norm
from graftune.kernels.delta_gates import reference as gates_reference
from graftune.kernels.gated_norm import reference as norm_reference
from tests.kernels.harness import DTYPES, ROUNDED, buffer, close, filled, untouched
from tests.support.pairwise import pairwise

EPS = 1e-6
F = torch.nn.functional
FP32 = ROUNDED[torch.float32]


def gate_inputs(tokens, heads, dtype, device="cpu"):
    torch.manual_seed(tokens)
    a, b = (3 * torch.randn(tokens, heads).to(device, dtype) for _ in range(2))
    a_log, dt_bias, grad_decay, grad_beta = (
        torch.randn(shape).to(device) for shape in ((heads,), (heads,), (tokens, heads), (tokens, heads))
    )
    return a, b, a_log, dt_bias, grad_decay, grad_beta


def test_gates_are_autograds():
    *given, grad_decay, grad_beta = gate_inputs(7, 3, torch.float32)
    a, b, a_log, dt_bias = (x.requires_grad_() for x in given)
    want = -a_log.exp() * F.softplus(a + dt_bias), b.sigmoid()
    torch.autograd.backward(want, (grad_decay, grad_beta))
    with torch.no_grad():
        got = torch.empty(7, 3), torch.empty(7, 3)
        grads = torch.empty(7, 3), torch.empty(7, 3), torch.ones(3), torch.ones(3)  # the last two are added to
        delta_gates.forward(a, b, a_log, dt_bias, *got)
        delta_gates.backward(grad_decay, grad_beta, a, b, a_log, dt_bias, *grads)
    for ours, right in zip(got, want, strict=True):
        close(ours, right, FP32)
    for ours, leaf, before in zip(grads, (a, b, a_log, dt_bias), (0, 0, 1, 1), strict=True):
        close(ours - before, leaf.grad, FP32)


@pairwise(("tokens", [1, 70]), ("heads", [1, 3, 32]), ("dtype", DTYPES), ("padding", [0, 5]))
def test_gate_kernels_are_the_references(kernels_on, device, tokens, heads, dtype, padding):
    a, b, a_log, dt_bias, grad_decay, grad_beta = gate_inputs(tokens, heads, dtype, device)
    (_, a_given), (_, b_given) = filled(a, padding), filled(b, padding)
    got = torch.full_like(grad_decay, torch.nan), torch.full_like(grad_decay, torch.nan)
    (a_wide, grad_a), (b_wide, grad_b) = (buffer(tokens, heads, padding, a) for _ in range(2))
    delta_gates.forward(a_given, b_given, a_log, dt_bias, *got)
    delta_gates.backward(grad_decay, grad_beta, a_given, b_given, a_log, dt_bias, grad_a, grad_b)
    want, want_grads = ([torch.empty_like(grad_decay) for _ in range(2)] for _ in range(2))
    gates_reference.forward(a, b, a_log, dt_bias, *want)
    gates_reference.backward(grad_decay, grad_beta, a, b, a_log, dt_bias, *want_grads, None, None)
    for ours, right in zip(got, want, strict=True):
        close(ours, right, FP32)
    for ours, right in zip((grad_a, grad_b), want_grads, strict=True):
        close(ours, right, ROUNDED[dtype])
    assert untouched(a_wide, grad_a) and untouched(b_wide, grad_b)


def norm_inputs(tokens, heads, width, dtype, device="cpu"):
    torch.manual_seed(width)
    x, gate, grad = (torch.randn(tokens, heads * width).to(device, dtype) for _ in range(3))
    return x, gate, torch.randn(width).to(device), grad


def test_gated_norm_is_autograds():
    x, gate, weight, grad = norm_inputs(5, 3, 4, torch.float32)
    for leaf in (x, gate, weight):
        leaf.requires_grad_()
    heads = x.view(5, 3, 4)
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + EPS)
    want = (normed * weight).flatten(1) * F.silu(gate)
    want.backward(grad)
    with torch.no_grad():
        out = torch.empty_like(x)
        grads = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x), torch.zeros_like(weight)
        gated_norm.forward(x, gate, weight, EPS, out)
        gated_norm.backward(grad, x, gate, weight, EPS, *grads)
    for ours, right in zip((out, *grads), (want, x.grad, gate.grad, want, weight.grad), strict=True):
        close(ours, right, FP32)


@pairwise(
    ("tokens, heads, width", [(1, 1, 4), (5, 3, 24), (70, 2, 128), (33, 2, 33)]),
    ("dtype", DTYPES), ("padding", [0, 8]), ("full", [False, True]),
)  # fmt: skip
def test_gated_norm_kernels_are_the_references(
    kernels_on, device, monkeypatch, tokens, heads, width, dtype, padding, full
):
    from graftune.kernels.gated_norm import kernel

    monkeypatch.setattr(kernel, "PROGRAMS", 2)  # so that a program has several tiles
    monkeypatch.setattr(kernel, "VALUES", 1024)
    x, gate, weight, grad = norm_inputs(tokens, heads, width, dtype, device)
    (_, x_given), (_, gate_given) = filled(x, padding), filled(gate, padding)
    buffers = [buffer(*x.shape, padding, x) for _ in range(4)]
    out, *outputs = [inner for _, inner in buffers]
    grad_weight = torch.ones_like(weight) if full else None
    gated_norm.forward(x_given, gate_given, weight, EPS, out)
    gated_norm.backward(grad, x_given, gate_given, weight, EPS, *outputs, grad_weight)
    want, *want_grads = (torch.empty(x.shape, device=device) for _ in range(4))
    want_weight = torch.ones_like(weight)
    norm_reference.forward(x, gate, weight, EPS, want)
    norm_reference.backward(grad, x, gate, weight, EPS, *want_grads, want_weight)
    for ours, right in zip((out, *outputs), (want, *want_grads), strict=True):
        close(ours, right, ROUNDED[dtype])
    assert all(untouched(wide, inner) for wide, inner in buffers)
    if full:
        close(grad_weight, want_weight, 1e-5)


@pytest.mark.parametrize("kernels", [False, True])
def test_gated_norm_works_in_place(monkeypatch, device, kernels):
    from graftune.kernels import launch

    monkeypatch.setattr(launch, "fused", lambda x: kernels)
    x, gate, weight, grad = norm_inputs(9, 2, 16, torch.float32, device)
    want = [torch.empty_like(x) for _ in range(3)]
    gated_norm.backward(grad, x, gate, weight, EPS, *want)
    gated_norm.backward(grad, x, gate, weight, EPS, x, gate, grad)
    assert all(torch.equal(got, right) for got, right in zip((x, gate, grad), want, strict=True))
