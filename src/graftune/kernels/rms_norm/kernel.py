"""The norm with the residual add. A program holds one row in registers, so each tensor is read or written once.

Computing the adapters' low-rank products here as well (blocks of 16 rows, two passes over the width) was slower: 140
instead of 87 microseconds for 8192 x 4096, and the products alone cost less than the difference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.lora_linear.kernel import add_up  # sums partial results, also those of weight gradients

PROGRAMS = 512  # programs that share the rows when a weight gradient is summed: nearly four per multiprocessor


@triton.jit
def normed_row(
    x_ptr, y_ptr, w_ptr, sum_ptr, rstd_ptr, eps, x_stride, row, cols, inside, D: tl.constexpr, ADD: tl.constexpr
):
    """norm(x + y) of a row in fp32; stores the sum and rstd."""
    v = tl.load(x_ptr + row * x_stride + cols, inside, other=0.0).to(tl.float32)
    if ADD:
        v = (v + tl.load(y_ptr + row * D + cols, inside, other=0.0).to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * D + cols, v, inside)
        v = v.to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(v * v, 0) / D + eps)
    tl.store(rstd_ptr + row, rstd)
    return v * rstd * tl.load(w_ptr + cols, inside, other=0.0)


@triton.jit
def through_norm(grad, n, w, rstd, D: tl.constexpr):
    """The gradient of the norm's input, for one row in fp32; n = x * rstd."""
    grad *= w
    return (grad - n * (tl.sum(grad * n, 0) / D)) * rstd


@launch.kernel
def _forward(
    x_ptr, y_ptr, w_ptr, sum_ptr, out_ptr, rstd_ptr, eps, x_stride, out_stride,
    D: tl.constexpr, ADD: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, B)
    inside = cols < D
    n = normed_row(x_ptr, y_ptr, w_ptr, sum_ptr, rstd_ptr, eps, x_stride, row, cols, inside, D, ADD)
    tl.store(out_ptr + row * out_stride + cols, n.to(out_ptr.dtype.element_ty), inside)


@launch.kernel
def _apply(x_ptr, rstd_ptr, w_ptr, out_ptr, D: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, B)
    inside = cols < D
    v = tl.load(x_ptr + row * D + cols, inside, other=0.0).to(tl.float32)
    n = v * tl.load(rstd_ptr + row) * tl.load(w_ptr + cols, inside, other=0.0)
    tl.store(out_ptr + row * D + cols, n.to(out_ptr.dtype.element_ty), inside)


@launch.kernel
def _backward(
    grad_ptr, x_ptr, rstd_ptr, w_ptr, residual_ptr, out_ptr, parts_ptr, tokens, per_program, grad_stride, x_stride,
    residual_stride, out_stride, D: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, B)
    inside = cols < D
    w = tl.load(w_ptr + cols, inside, other=0.0)
    if WEIGHT:
        part = tl.zeros([B], tl.float32)
    first = tl.program_id(0) * per_program
    for row in range(first, min(first + per_program, tokens)):
        at = tl.cast(row, tl.int64)
        rstd = tl.load(rstd_ptr + at)
        grad = tl.load(grad_ptr + at * grad_stride + cols, inside, other=0.0).to(tl.float32)
        n = tl.load(x_ptr + at * x_stride + cols, inside, other=0.0).to(tl.float32) * rstd
        if WEIGHT:
            part += grad * n
        out = through_norm(grad, n, w, rstd, D)
        if RESIDUAL:
            out += tl.load(residual_ptr + at * residual_stride + cols, inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at * out_stride + cols, out.to(out_ptr.dtype.element_ty), inside)
    if WEIGHT:
        tl.store(parts_ptr + tl.program_id(0).to(tl.int64) * D + cols, part, inside)


def _warps(width: int) -> int:
    return min(16, max(1, launch.power_of_two(width) // 1024))


def add_forward(
    x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, width = x.shape
    total = x if y is None else y
    rstd = torch.empty(tokens, dtype=torch.float32, device=x.device)
    _forward[(tokens,)](
        x, y, weight, total, out, rstd, eps, x.stride(0), out.stride(0), D=width, ADD=y is not None,
        B=launch.power_of_two(width), num_warps=_warps(width),
    )  # fmt: skip
    return total, rstd


def apply(x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    tokens, width = x.shape
    out = torch.empty_like(x)
    _apply[(tokens,)](x, rstd, weight, out, D=width, B=launch.power_of_two(width), num_warps=_warps(width))
    return out


def add_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    tokens, width = x.shape
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is None else residual
    programs = tokens if grad_weight is None else min(tokens, PROGRAMS)
    per_program = triton.cdiv(tokens, programs)
    programs = triton.cdiv(tokens, per_program)
    parts = None if grad_weight is None else torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        grad_y, x, rstd, weight, residual, out, parts, tokens, per_program, grad_y.stride(0), x.stride(0),
        residual.stride(0) if residual is not None else 0, out.stride(0), D=width,
        RESIDUAL=residual is not None, WEIGHT=grad_weight is not None, B=launch.power_of_two(width),
        num_warps=_warps(width),
    )  # fmt: skip
    if grad_weight is not None and parts is not None:
        add_up(parts, grad_weight, add=True)
    return out
