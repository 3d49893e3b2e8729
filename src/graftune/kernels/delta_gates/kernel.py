"""Decay and beta in tiles of tokens and heads. The gradients of A_log and dt_bias, which only full training needs, come
from the reference (__init__.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch

VALUES, WARPS = 1024, 4  # per program


@triton.jit
def _place(T, V, BT: tl.constexpr, BV: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    heads = tl.arange(0, BV)
    return rows[:, None], heads[None, :], (rows < T)[:, None] & (heads < V)[None, :]


@triton.jit
def _rate_and_shifted(a_ptr, log_ptr, bias_ptr, rows, heads, live, V, stride):
    """-exp(A_log) and a + dt_bias."""
    a = tl.load(a_ptr + rows * stride + heads, live, other=0.0).to(tl.float32)
    log, bias = tl.load(log_ptr + heads, heads < V, other=0.0), tl.load(bias_ptr + heads, heads < V, other=0.0)
    return -tl.exp(log), a + bias


@launch.kernel
def _forward(
    a_ptr, b_ptr, log_ptr, bias_ptr, decay_ptr, beta_ptr, T, V, a_stride, b_stride, BT: tl.constexpr, BV: tl.constexpr
):
    rows, heads, live = _place(T, V, BT, BV)
    rate, shifted = _rate_and_shifted(a_ptr, log_ptr, bias_ptr, rows, heads, live, V, a_stride)
    # softplus, without overflow for large values and without loss for small ones
    small = tl.exp(-tl.abs(shifted))
    rest = tl.where(small < 1e-4, small - 0.5 * small * small, tl.log(1.0 + small))
    b = tl.load(b_ptr + rows * b_stride + heads, live, other=0.0).to(tl.float32)
    tl.store(decay_ptr + rows * V + heads, rate * (tl.maximum(shifted, 0.0) + rest), live)
    tl.store(beta_ptr + rows * V + heads, tl.sigmoid(b), live)


@launch.kernel
def _backward(
    grad_decay_ptr, grad_beta_ptr, a_ptr, b_ptr, log_ptr, bias_ptr, grad_a_ptr, grad_b_ptr, T, V, a_stride, b_stride,
    grad_a_stride, grad_b_stride, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    rows, heads, live = _place(T, V, BT, BV)
    rate, shifted = _rate_and_shifted(a_ptr, log_ptr, bias_ptr, rows, heads, live, V, a_stride)
    beta = tl.sigmoid(tl.load(b_ptr + rows * b_stride + heads, live, other=0.0).to(tl.float32))
    grad_decay = tl.load(grad_decay_ptr + rows * V + heads, live, other=0.0)
    grad_beta = tl.load(grad_beta_ptr + rows * V + heads, live, other=0.0)
    kind = grad_a_ptr.dtype.element_ty
    tl.store(grad_a_ptr + rows * grad_a_stride + heads, (grad_decay * rate * tl.sigmoid(shifted)).to(kind), live)
    tl.store(grad_b_ptr + rows * grad_b_stride + heads, (grad_beta * beta * (1.0 - beta)).to(kind), live)


def forward(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, decay: torch.Tensor,
    beta: torch.Tensor,
) -> None:  # fmt: skip
    tokens, heads = a.shape
    rows, columns = _tile(heads)
    _forward[(triton.cdiv(tokens, rows),)](
        a, b, a_log, dt_bias, decay, beta, tokens, heads, a.stride(0), b.stride(0), BT=rows, BV=columns,
        num_warps=WARPS,
    )  # fmt: skip


def backward(
    grad_decay: torch.Tensor, grad_beta: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor,
    dt_bias: torch.Tensor, grad_a: torch.Tensor, grad_b: torch.Tensor,
) -> None:  # fmt: skip
    tokens, heads = a.shape
    rows, columns = _tile(heads)
    _backward[(triton.cdiv(tokens, rows),)](
        grad_decay, grad_beta, a, b, a_log, dt_bias, grad_a, grad_b, tokens, heads, a.stride(0), b.stride(0),
        grad_a.stride(0), grad_b.stride(0), BT=rows, BV=columns, num_warps=WARPS,
    )  # fmt: skip


def _tile(heads: int) -> tuple[int, int]:
    columns = launch.power_of_two(heads)
    return max(1, VALUES // columns), columns
